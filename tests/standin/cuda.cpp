// Stands in for libcuda.so.1 and libcudart: memory, streams, events, captures and launches as far as PyTorch's host code needs them.
//
// Device memory is host memory, so the CPU can compute in it (emulate.py). Kernels do nothing. A stream does its work at once, in the
// order in which the host issues it; what a real driver refuses (above all in a capture) is refused here with the same error code.
// Environment: STANDIN_GPUS, STANDIN_NAME, STANDIN_GIB, STANDIN_HANG (see build.py).
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cudnn_version.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "standin.h"

namespace {

constexpr int kMostGpus = 64;
constexpr long kLaunchQueue = 1024;  // launches that a real driver queues before the host has to wait

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  cudaStream_t origin;
  std::set<int> leaf_nodes;  // nodes that no other node waits for
  int nodes = 0;
  bool invalid = false;
};

struct Stream {
  int device;
  int priority;
  Capture* capture = nullptr;
  std::set<int> tail;  // nodes that the stream's next node waits for
};

struct Event {
  unsigned flags;
  bool recorded = false;
  bool done = true;
  double milliseconds = 0;
  unsigned long long capture = 0;  // the capture in which it was last recorded
  std::set<int> tail;
};

struct Graph {
  int nodes;
};

struct Block {
  size_t size;
  cudaMemoryType type;
  int device;
};

struct Kernel {
  const char* name;
  long launches;
};

struct LaunchConfiguration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
thread_local std::vector<LaunchConfiguration> configurations;

std::atomic<bool> contexts[kMostGpus];
std::atomic<bool> device_hangs{false};
std::atomic<bool> device_failed{false};  // for good, as after an assertion in a kernel
std::atomic<long> launches{0};
std::atomic<long> graph_launches{0};
std::atomic<long> launches_while_hung{0};

std::map<cudaStream_t, Stream*> streams;
std::map<unsigned long long, Capture*> captures;
std::map<char*, Block> blocks;
size_t allocated[kMostGpus];
std::unordered_map<const void*, Kernel> kernels;
std::vector<std::function<void()>> recordings;

int gpus() {
  const char* count = getenv("STANDIN_GPUS");
  return count ? atoi(count) : 1;
}

size_t memory() {
  const char* gib = getenv("STANDIN_GIB");
  return static_cast<size_t>((gib ? atof(gib) : 80.0) * (1 << 30));
}

size_t held_by_others() {
  const char* gib = getenv("STANDIN_OTHERS_GIB");
  return static_cast<size_t>((gib ? atof(gib) : 0.0) * (1 << 30));
}

double milliseconds() {
  auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since).count();
}

cudaError_t fail(cudaError_t error, const char* call) {
  last_error = error;
  fprintf(stderr, "[stand-in %d] %s: %s\n", getpid(), call, cudaGetErrorString(error));
  return error;
}

cudaError_t status() { return device_failed ? last_error = cudaErrorAssert : cudaSuccess; }

template <class Place, class Value>
cudaError_t give(Place* place, Value value) {
  if (place != nullptr) *place = value;
  return cudaSuccess;
}

void wait_for_device() {
  while (device_hangs) usleep(100000);
}

// The legacy and the per-thread stream have no handle of their own: each device has one.
Stream* stream_of(cudaStream_t handle) {
  if (handle != nullptr && handle != cudaStreamLegacy && handle != cudaStreamPerThread) return reinterpret_cast<Stream*>(handle);
  static std::map<int, Stream*> legacy;
  Stream*& stream = legacy[current_device];
  if (stream == nullptr) stream = new Stream{current_device, 0};
  return stream;
}

// Adds a node after what the stream has recorded so far; nothing outside a capture.
void add_node(Stream* stream) {
  Capture* capture = stream->capture;
  if (capture == nullptr) return;
  int node = capture->nodes++;
  for (int before : stream->tail) capture->leaf_nodes.erase(before);
  capture->leaf_nodes.insert(node);
  stream->tail = {node};
}

// A call that may wait for a device is forbidden to the thread that captures, and in global mode to all threads that have not
// exchanged their own mode: the call fails, and so does the capture.
bool forbidden() {
  bool refused = false;
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  for (auto& [id, capture] : captures) {
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    bool global = capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    if (global || capture->thread == std::this_thread::get_id()) refused = capture->invalid = true;
  }
  return refused;
}

#define REFUSE_IN_CAPTURE(call) \
  Lock lock(mutex);             \
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported, call)

#define WAIT_REFUSED_IN_CAPTURE(call) \
  {                                   \
    REFUSE_IN_CAPTURE(call);          \
  }                                   \
  wait_for_device()

}  // namespace

bool standin::hung() { return device_hangs; }

bool standin::recorded(void* handle, std::function<void()> work) {
  Lock lock(mutex);
  Stream* stream = stream_of(static_cast<cudaStream_t>(handle));
  if (stream->capture == nullptr) return false;
  add_node(stream);
  recordings.push_back(std::move(work));
  return true;
}

long standin::fault(const char* variable, int who) {
  const char* text = getenv(variable);
  int whose = 0;
  long number = 0;
  bool meant = text != nullptr && sscanf(text, "%d:%ld", &whose, &number) == 2 && whose == who;
  return meant ? number : -1;
}

// Devices: a process has a context on a device as soon as it has done anything there.

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = gpus();
  return *count ? cudaSuccess : cudaErrorNoDevice;
}

API cudaError_t cudaGetDevice(int* device) { return give(device, current_device); }

API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= gpus()) return fail(cudaErrorInvalidDevice, "cudaSetDevice");
  current_device = device;
  contexts[device] = true;
  return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int* version) { return give(version, CUDART_VERSION); }

API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  give(least, 0);
  return give(greatest, -5);
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  const char* name = getenv("STANDIN_NAME");
  snprintf(properties->name, sizeof properties->name, "%s", name ? name : "Stand-in for a GPU");
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  properties->pciBusID = device + 1;
  properties->major = 9;
  properties->totalGlobalMem = memory();
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->l2CacheSize = 50 << 20;
  properties->textureAlignment = 512;
  properties->memoryBusWidth = 5120;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, device);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: return give(value, properties.multiProcessorCount);
    case cudaDevAttrComputeCapabilityMajor: return give(value, properties.major);
    case cudaDevAttrWarpSize: return give(value, properties.warpSize);
    case cudaDevAttrMaxThreadsPerBlock: return give(value, properties.maxThreadsPerBlock);
    case cudaDevAttrMaxThreadsPerMultiProcessor: return give(value, properties.maxThreadsPerMultiProcessor);
    case cudaDevAttrMaxSharedMemoryPerBlock: return give(value, properties.sharedMemPerBlock);
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return give(value, properties.sharedMemPerBlockOptin);
    case cudaDevAttrMaxGridDimX: return give(value, properties.maxGridSize[0]);
    case cudaDevAttrMaxGridDimY: return give(value, properties.maxGridSize[1]);
    case cudaDevAttrMaxGridDimZ: return give(value, properties.maxGridSize[2]);
    default: return give(value, 0);
  }
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) { return give(can, device != peer); }

API cudaError_t cudaDeviceSynchronize() {
  WAIT_REFUSED_IN_CAPTURE("cudaDeviceSynchronize");
  contexts[current_device] = true;
  return status();
}

API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

API cudaError_t cudaPeekAtLastError() { return last_error; }

// The driver's own words, for what is refused here: PyTorch puts them into its exceptions.
API const char* cudaGetErrorString(cudaError_t error) {
  static const std::map<cudaError_t, const char*> texts = {
      {cudaSuccess, "no error"},
      {cudaErrorInvalidValue, "invalid argument"},
      {cudaErrorMemoryAllocation, "out of memory"},
      {cudaErrorNoDevice, "no CUDA-capable device is detected"},
      {cudaErrorAssert, "device-side assert triggered"},
      {cudaErrorInvalidDevice, "invalid device ordinal"},
      {cudaErrorInvalidResourceHandle, "invalid resource handle"},
      {cudaErrorIllegalState, "the operation cannot be performed in the present state"},
      {cudaErrorNotReady, "device not ready"},
      {cudaErrorNotSupported, "operation not supported"},
      {cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"},
      {cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"},
      {cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences"},
      {cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"},
      {cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"},
      {cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"},
      {cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capturing blocking stream"},
      {cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"},
      {cudaErrorStreamCaptureWrongThread, "attempt to terminate a thread-local capture sequence from another thread"},
  };
  auto text = texts.find(error);
  return text == texts.end() ? "unknown error" : text->second;
}

API const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// Memory. What is new is filled with bytes that are NaN in every format of floating point, as a real device promises no zeros.

namespace {

Block* block_of(const void* pointer) {
  auto block = blocks.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  if (block == blocks.begin()) return nullptr;
  --block;
  return pointer < block->first + block->second.size ? &block->second : nullptr;
}

cudaError_t allocate(void** pointer, size_t size, cudaMemoryType type, const char* call) {
  constexpr size_t kMostFilled = 64 << 20;
  Lock lock(mutex);
  size = size ? size : 1;
  *pointer = nullptr;
  bool on_device = type == cudaMemoryTypeDevice;
  if (on_device && allocated[current_device] + size + held_by_others() > memory()) return fail(cudaErrorMemoryAllocation, call);
  void* made = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return fail(cudaErrorMemoryAllocation, call);
  if (on_device && size <= kMostFilled) memset(made, 0xff, size);
  if (on_device) allocated[current_device] += size;
  blocks[static_cast<char*>(made)] = {size, type, current_device};
  contexts[current_device] = true;
  *pointer = made;
  return cudaSuccess;
}

cudaError_t release(void* pointer, const char* call) {
  if (pointer == nullptr) return cudaSuccess;
  Lock lock(mutex);
  auto block = blocks.find(static_cast<char*>(pointer));
  if (block == blocks.end()) return fail(cudaErrorInvalidValue, call);
  if (block->second.type == cudaMemoryTypeDevice) allocated[block->second.device] -= block->second.size;
  munmap(pointer, block->second.size);
  blocks.erase(block);
  return cudaSuccess;
}

// Does a stream's work: at once, in a graph's replays, or never.
void enqueue(cudaStream_t stream, std::function<void()> work) {
  if (!standin::recorded(stream, work) && !device_hangs) work();
}

// A copy that a graph records would read pageable memory when the graph is replayed: the driver refuses it.
cudaError_t copy(void* to, const void* from, size_t size, cudaStream_t handle, const char* call) {
  Lock lock(mutex);
  Stream* stream = stream_of(handle);
  contexts[current_device] = true;
  if (stream->capture != nullptr && (block_of(to) == nullptr || block_of(from) == nullptr)) {
    stream->capture->invalid = true;
    return fail(cudaErrorStreamCaptureUnsupported, call);
  }
  enqueue(handle, [=] { memmove(to, from, size); });
  return status();
}

}  // namespace

API cudaError_t cudaMalloc(void** pointer, size_t size) {
  REFUSE_IN_CAPTURE("cudaMalloc");
  return allocate(pointer, size, cudaMemoryTypeDevice, "cudaMalloc");
}

API cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t) {
  return allocate(pointer, size, cudaMemoryTypeDevice, "cudaMallocAsync");
}

API cudaError_t cudaFree(void* pointer) {
  REFUSE_IN_CAPTURE("cudaFree");
  return release(pointer, "cudaFree");
}

API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release(pointer, "cudaFreeAsync"); }

API cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  REFUSE_IN_CAPTURE("cudaHostAlloc");
  return allocate(pointer, size, cudaMemoryTypeHost, "cudaHostAlloc");
}

API cudaError_t cudaMallocHost(void** pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }

API cudaError_t cudaFreeHost(void* pointer) {
  REFUSE_IN_CAPTURE("cudaFreeHost");
  return release(pointer, "cudaFreeHost");
}

API cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  Lock lock(mutex);
  blocks[static_cast<char*>(pointer)] = {size, cudaMemoryTypeHost, current_device};
  return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* pointer) {
  Lock lock(mutex);
  blocks.erase(static_cast<char*>(pointer));
  return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = memory();
  *free = *total - held_by_others() - allocated[current_device];
  contexts[current_device] = true;
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  Lock lock(mutex);
  *attributes = {};
  Block* block = block_of(pointer);
  attributes->type = block ? block->type : cudaMemoryTypeUnregistered;
  attributes->device = block ? block->device : -2;
  if (block != nullptr) attributes->devicePointer = const_cast<void*>(pointer);
  if (block != nullptr && block->type == cudaMemoryTypeHost) attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  WAIT_REFUSED_IN_CAPTURE("cudaMemcpy");
  return copy(to, from, size, nullptr, "cudaMemcpy");
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, size, stream, "cudaMemcpyAsync");
}

API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return copy(to, from, size, stream, "cudaMemcpyPeerAsync");
}

API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                                  cudaMemcpyKind, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  for (size_t row = 0; row < height && error == cudaSuccess; row++) {
    char* target = static_cast<char*>(to) + row * to_pitch;
    error = copy(target, static_cast<const char*>(from) + row * from_pitch, width, stream, "cudaMemcpy2DAsync");
  }
  return error;
}

API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  contexts[current_device] = true;
  launches++;
  enqueue(stream, [=] { memset(pointer, value, size); });
  return status();
}

API cudaError_t cudaMemset(void* pointer, int value, size_t size) {
  REFUSE_IN_CAPTURE("cudaMemset");
  return cudaMemsetAsync(pointer, value, size, nullptr);
}

API cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static char symbols[1 << 16];
  return give(pointer, symbols);
}

// Streams and events. A stream that waits for an event of a capture joins the capture.

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int priority) {
  Lock lock(mutex);
  auto* stream = new Stream{current_device, priority};
  *handle = reinterpret_cast<cudaStream_t>(stream);
  streams[*handle] = stream;
  contexts[current_device] = true;
  return cudaSuccess;
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Lock lock(mutex);
  streams.erase(stream);
  return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) { return give(priority, stream_of(stream)->priority); }

API cudaError_t cudaStreamQuery(cudaStream_t) {
  REFUSE_IN_CAPTURE("cudaStreamQuery");
  return device_hangs ? last_error = cudaErrorNotReady : status();
}

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  {
    Lock lock(mutex);
    Stream* stream = stream_of(handle);
    if (stream->capture != nullptr) {
      stream->capture->invalid = true;
      return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
    }
  }
  WAIT_REFUSED_IN_CAPTURE("cudaStreamSynchronize");
  contexts[current_device] = true;
  return status();
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  *handle = reinterpret_cast<cudaEvent_t>(new Event{flags});
  contexts[current_device] = true;
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete reinterpret_cast<Event*>(handle);
  return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
  Lock lock(mutex);
  auto* event = reinterpret_cast<Event*>(handle);
  Stream* stream = stream_of(stream_handle);
  event->recorded = true;
  event->done = !device_hangs;
  event->milliseconds = milliseconds();
  event->capture = stream->capture ? stream->capture->id : 0;
  event->tail = stream->tail;
  if (flags & cudaEventRecordExternal) add_node(stream);
  return status();
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  REFUSE_IN_CAPTURE("cudaEventQuery");
  auto* event = reinterpret_cast<Event*>(handle);
  if (event->capture) {
    auto capture = captures.find(event->capture);
    if (capture != captures.end()) capture->second->invalid = true;
    return fail(cudaErrorCapturedEvent, "cudaEventQuery");
  }
  return event->done ? status() : last_error = cudaErrorNotReady;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  {
    REFUSE_IN_CAPTURE("cudaEventSynchronize");
    if (event->capture) return fail(cudaErrorCapturedEvent, "cudaEventSynchronize");
    if (event->done) return status();
  }
  wait_for_device();
  return status();
}

API cudaError_t cudaEventElapsedTime(float* elapsed, cudaEvent_t from, cudaEvent_t to) {
  auto* first = reinterpret_cast<Event*>(from);
  auto* last = reinterpret_cast<Event*>(to);
  bool timed = !((first->flags | last->flags) & cudaEventDisableTiming);
  if (!timed || !first->recorded || !last->recorded) return fail(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime");
  if (first->capture || last->capture) return fail(cudaErrorCapturedEvent, "cudaEventElapsedTime");
  if (!first->done || !last->done) return last_error = cudaErrorNotReady;
  *elapsed = static_cast<float>(last->milliseconds - first->milliseconds);
  return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned flags) {
  Lock lock(mutex);
  Stream* stream = stream_of(handle);
  auto* event = reinterpret_cast<Event*>(event_handle);
  auto entry = captures.find(event->capture);
  if (entry == captures.end()) {
    if (!event->recorded || stream->capture == nullptr || (flags & cudaEventWaitExternal)) return cudaSuccess;
    stream->capture->invalid = true;
    return fail(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  }
  Capture* capture = entry->second;
  if (stream->capture != nullptr && stream->capture != capture) {
    capture->invalid = stream->capture->invalid = true;
    return fail(cudaErrorStreamCaptureMerge, "cudaStreamWaitEvent");
  }
  if (handle == nullptr) {
    capture->invalid = true;
    return fail(cudaErrorStreamCaptureImplicit, "cudaStreamWaitEvent");
  }
  if (stream->capture == nullptr) {
    stream->capture = capture;
    stream->tail.clear();
  }
  stream->tail.insert(event->tail.begin(), event->tail.end());
  return cudaSuccess;
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* argument, unsigned) {
  call(stream, cudaSuccess, argument);
  return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* argument) {
  enqueue(stream, [=] { call(argument); });
  return cudaSuccess;
}

// Captures. A graph is the number of its nodes: emulate.py and `recordings` hold what its replay does.

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  static unsigned long long last_id = 0;
  Lock lock(mutex);
  if (handle == nullptr) return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture");
  Stream* stream = stream_of(handle);
  if (stream->capture != nullptr) return fail(cudaErrorIllegalState, "cudaStreamBeginCapture");
  stream->capture = new Capture{++last_id, mode, std::this_thread::get_id(), handle};
  stream->tail.clear();
  captures[last_id] = stream->capture;
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Lock lock(mutex);
  *graph = nullptr;
  Stream* origin = stream_of(handle);
  Capture* capture = origin->capture;
  if (capture == nullptr) return fail(cudaErrorIllegalState, "cudaStreamEndCapture");
  if (capture->origin != handle) return fail(cudaErrorStreamCaptureUnmatched, "cudaStreamEndCapture");
  bool elsewhere = capture->thread != std::this_thread::get_id();
  if (elsewhere && capture->mode != cudaStreamCaptureModeRelaxed) return fail(cudaErrorStreamCaptureWrongThread, "cudaStreamEndCapture");
  bool unjoined = false;
  for (int leaf : capture->leaf_nodes) unjoined |= origin->tail.count(leaf) == 0;
  captures.erase(capture->id);
  for (auto& [stream_handle, stream] : streams) {
    if (stream->capture != capture) continue;
    stream->capture = nullptr;
    stream->tail.clear();
  }
  if (capture->invalid) return fail(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
  if (unjoined) return fail(cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture");
  *graph = reinterpret_cast<cudaGraph_t>(new Graph{capture->nodes});
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                                         const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges, size_t* count) {
  Lock lock(mutex);
  Capture* capture = stream_of(stream)->capture;
  *status = cudaStreamCaptureStatusNone;
  if (capture != nullptr) *status = capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  give(id, capture ? capture->id : 0);
  give(graph, reinterpret_cast<cudaGraph_t>(capture));
  give(dependencies, nullptr);
  give(edges, nullptr);
  return give(count, 0);
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  return give(executable, reinterpret_cast<cudaGraphExec_t>(graph));
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  launches++;
  graph_launches++;
  return cudaSuccess;
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  return give(count, reinterpret_cast<Graph*>(graph)->nodes);
}

API cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void*, cudaHostFn_t, unsigned, unsigned) {
  return give(object, reinterpret_cast<cudaUserObject_t>(1));
}

// Kernels: counted, ordered within a capture, and left undone.

namespace {

// _sleep of PyTorch waits for so many cycles: many minutes of them are a device that hangs.
bool sleeps_for_ever(const char* name, void** arguments) {
  return strstr(name, "spin_kernel") != nullptr && *static_cast<long*>(arguments[0]) > 1L << 40;
}

cudaError_t launch(const void* function, void** arguments, cudaStream_t stream) {
  {
    Lock lock(mutex);
    contexts[current_device] = true;
    auto kernel = kernels.find(function);
    long number = ++launches;
    bool hangs = number == standin::fault("STANDIN_HANG", current_device);
    if (kernel != kernels.end()) {
      kernel->second.launches++;
      hangs |= sleeps_for_ever(kernel->second.name, arguments);
    }
    if (hangs) {
      fprintf(stderr, "[stand-in %d] GPU %d hangs\n", getpid(), current_device);
      device_hangs = true;
    }
    add_node(stream_of(stream));
  }
  if (device_hangs && ++launches_while_hung > kLaunchQueue) wait_for_device();
  return status();
}

}  // namespace

API void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}

API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernels[function] = {name, 0};
}

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  LaunchConfiguration configuration = configurations.back();
  configurations.pop_back();
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(function, arguments, stream);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function, void** arguments) {
  return launch(function, arguments, configuration->stream);
}

API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return give(kernel, reinterpret_cast<cudaKernel_t>(const_cast<void*>(function)));
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  return give(count, 2);
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) { return give(count, 2); }

// The driver's interface, which PyTorch asks for contexts, and for entry points by name.

API CUresult cuDeviceGet(CUdevice* device, int ordinal) { return static_cast<CUresult>(give(device, ordinal)); }

API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return static_cast<CUresult>(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = contexts[device];
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  contexts[device] = true;
  *context = reinterpret_cast<CUcontext>(static_cast<size_t>(device + 1));
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext* context) {
  bool exists = contexts[current_device];
  *context = exists ? reinterpret_cast<CUcontext>(static_cast<size_t>(current_device + 1)) : nullptr;
  return CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute, CUdeviceptr) {
  return static_cast<CUresult>(give(static_cast<int*>(value), 0));
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  void* own = dlsym(RTLD_DEFAULT, name);
  *function = own ? own : reinterpret_cast<void*>(+[] { return cudaErrorNotSupported; });
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// The few calls of the libraries whose answer PyTorch uses; build.py makes the others succeed, as kernels do.

API int cublasCreate_v2(void** handle) { return give(handle, reinterpret_cast<void*>(1)); }

API int cublasGetMathMode(void*, int* mode) { return give(mode, 0); }

API int cublasGetPointerMode_v2(void*, int* mode) { return give(mode, 0); }

API size_t cublasLtGetVersion() { return CUDART_VERSION * 10; }

API size_t cudnnGetVersion() { return CUDNN_VERSION; }

API int cudnnGetProperty(int part, int* value) {
  const int version[] = {CUDNN_MAJOR, CUDNN_MINOR, CUDNN_PATCHLEVEL};
  return give(value, version[part]);
}

API size_t cudnnGetCudartVersion() { return CUDART_VERSION; }

API const char* cudnnGetErrorString(int) { return "the stand-in has no cuDNN"; }

// For emulate.py and probes.py.

API int standin_hung() { return device_hangs; }

API void standin_fail() { device_failed = true; }

API long standin_launches() { return launches; }

API long standin_graph_launches() { return graph_launches; }

// One bit for each device on which this process has a context.
API unsigned long standin_contexts() {
  unsigned long bits = 0;
  for (int device = 0; device < kMostGpus; device++) bits |= static_cast<unsigned long>(contexts[device]) << device;
  return bits;
}

// A kernel whose host code is not run.
API void standin_launch(void* stream) { launch(nullptr, nullptr, static_cast<cudaStream_t>(stream)); }

API long standin_recordings() {
  Lock lock(mutex);
  return static_cast<long>(recordings.size());
}

API void standin_replay(long first, long last) {
  for (long number = first; number < last; number++) {
    std::function<void()> work;
    {
      Lock lock(mutex);
      work = recordings[number];
    }
    work();
  }
}

// The kernels that were launched, the most frequent first.
API void standin_print_kernels() {
  Lock lock(mutex);
  std::multimap<long, const char*, std::greater<long>> sorted;
  for (auto& [function, kernel] : kernels) {
    if (kernel.launches) sorted.emplace(kernel.launches, kernel.name);
  }
  for (auto& [count, name] : sorted) fprintf(stderr, "%8ld %.200s\n", count, name);
}
