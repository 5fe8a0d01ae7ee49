// Stands in for NCCL: collectives with real results between the processes of one machine, through shared memory.
//
// Each communicator is a file in the folder STANDIN_NCCL that all its ranks map, and that is removed once all have. A collective goes
// through it in chunks: a rank writes its chunk into its slot, rings the bell, and waits until all slots are filled. Sums are taken in the
// order of the ranks. The host waits where a device would; who waits sleeps on the bell (a futex).
// Environment: STANDIN_NCCL, STANDIN_NCCL_FAIL (see build.py).
#include <cuda_runtime_api.h>
// Headers for nvcc, which nccl.h includes but does not use.
#define __CUDA_RUNTIME_H__
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <fcntl.h>
#include <linux/futex.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <set>
#include <string>
#include <vector>

#include "standin.h"

namespace {

constexpr size_t kChunk = 1 << 20;

// Written by one rank, read by all. A rank fills the half that `turn` names while the others may still read the other half.
struct Slot {
  std::atomic<unsigned long> turn;
  size_t bytes[2];
  char data[2][kChunk];
};

// Written by one rank, read by one other.
struct Mailbox {
  std::atomic<unsigned long> sent, taken;
  char data[kChunk];
};

struct Communicator {
  std::string name;
  int rank, size;
  std::atomic<unsigned>* bell;
  Slot* slots;
  Mailbox* mailboxes;
  unsigned long turn = 0;
  int splits = 0;
  std::atomic<bool> aborted{false};
  std::atomic<ncclResult_t> error{ncclSuccess};
};

// A send or a receive on its way.
struct Transfer {
  Communicator* communicator;
  Mailbox* mailbox;
  bool sends;
  char* data;
  size_t left;
  bool ended = false;
};

std::atomic<long> collectives{0};
std::atomic<int> world_rank{-1};
thread_local int group_depth = 0;
thread_local std::vector<Transfer> transfers;

Communicator* communicator_of(ncclComm_t handle) { return reinterpret_cast<Communicator*>(handle); }

void ring(Communicator* communicator) {
  ++*communicator->bell;
  syscall(SYS_futex, communicator->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Sleeps until the bell has been rung since it was read.
void sleep(Communicator* communicator, unsigned rung) {
  const timespec tenth = {0, 100'000'000};
  syscall(SYS_futex, communicator->bell, FUTEX_WAIT, rung, &tenth, nullptr, 0);
}

// Sleeps until the condition holds; false if the communicator is aborted before.
template <class Condition>
bool wait_until(Communicator* communicator, Condition holds) {
  while (!communicator->aborted) {
    unsigned rung = *communicator->bell;
    if (holds()) return true;
    sleep(communicator, rung);
  }
  return false;
}

// Shows every rank's bytes to every rank: use(rank, offset, chunk, size).
template <class Use>
ncclResult_t exchange(Communicator* communicator, const void* data, size_t bytes, Use use) {
  for (size_t offset = 0; offset == 0 || offset < bytes; offset += kChunk) {
    size_t size = std::min(kChunk, bytes - offset);
    unsigned long turn = ++communicator->turn;
    Slot& own = communicator->slots[communicator->rank];
    memcpy(own.data[turn % 2], static_cast<const char*>(data) + offset, size);
    own.bytes[turn % 2] = bytes;
    own.turn = turn;
    ring(communicator);
    for (int rank = 0; rank < communicator->size; rank++) {
      Slot& slot = communicator->slots[rank];
      if (!wait_until(communicator, [&] { return slot.turn >= turn; })) return ncclInternalError;
      if (slot.bytes[turn % 2] != bytes) {
        fprintf(stderr, "[stand-in] ranks %d and %d are in different collectives: %zu and %zu bytes\n", communicator->rank, rank, bytes,
                slot.bytes[turn % 2]);
        return ncclInvalidUsage;
      }
      use(rank, offset, slot.data[turn % 2], size);
    }
  }
  return ncclSuccess;
}

// Arithmetic: the small formats are summed in float, and rounded once.

struct Bfloat16 {
  unsigned short bits;
  Bfloat16() = default;
  Bfloat16(float value) {
    unsigned wide;
    memcpy(&wide, &value, sizeof wide);
    wide += value == value ? 0x7fff + ((wide >> 16) & 1) : 0;
    bits = wide >> 16;
  }
  operator float() const {
    unsigned wide = static_cast<unsigned>(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
};

template <class Call>
auto with_type(ncclDataType_t type, Call call) {
  switch (type) {
    case ncclInt8: return call(int8_t(), int8_t());
    case ncclInt32: return call(int32_t(), int32_t());
    case ncclUint32: return call(uint32_t(), uint32_t());
    case ncclInt64: return call(int64_t(), int64_t());
    case ncclUint64: return call(uint64_t(), uint64_t());
    case ncclFloat16: return call(_Float16(), float());
    case ncclBfloat16: return call(Bfloat16(), float());
    case ncclFloat32: return call(float(), float());
    case ncclFloat64: return call(double(), double());
    default: return call(uint8_t(), uint8_t());
  }
}

size_t width(ncclDataType_t type) {
  return with_type(type, [](auto value, auto) { return sizeof value; });
}

// The factors of sums that scale what a rank brings; their operations are numbered from ncclNumOps on.
std::vector<double> factors;

template <class T>
T combined(T total, T value, ncclRedOp_t operation) {
  switch (operation) {
    case ncclProd: return total * value;
    case ncclMax: return std::max(total, value);
    case ncclMin: return std::min(total, value);
    default: return total + value;
  }
}

// The reduction of all ranks' values, in every rank's `out`.
ncclResult_t reduce(Communicator* communicator, const void* data, char* out, size_t count, ncclDataType_t type, ncclRedOp_t operation) {
  return with_type(type, [&](auto narrow, auto wide) {
    using Narrow = decltype(narrow);
    using Wide = decltype(wide);
    Wide factor = operation < ncclNumOps ? 1 : factors[operation - ncclNumOps];
    std::vector<Wide> totals(std::min(count, kChunk / sizeof narrow));
    return exchange(communicator, data, count * sizeof narrow, [&](int rank, size_t offset, const char* chunk, size_t size) {
      auto* values = reinterpret_cast<const Narrow*>(chunk);
      auto* target = reinterpret_cast<Narrow*>(out + offset);
      size_t values_here = size / sizeof narrow;
      for (size_t i = 0; i < values_here; i++) {
        Wide value = values[i] * factor;
        totals[i] = rank ? combined<Wide>(totals[i], value, operation) : value;
      }
      if (rank + 1 < communicator->size) return;
      Wide divisor = operation == ncclAvg ? communicator->size : 1;
      for (size_t i = 0; i < values_here; i++) target[i] = static_cast<Narrow>(totals[i] / divisor);
    });
  });
}

// Moves a chunk if the mailbox lets it; false if it does not.
bool move(Transfer& transfer) {
  bool full = transfer.mailbox->sent != transfer.mailbox->taken;
  if (full == transfer.sends) return false;
  size_t size = std::min(kChunk, transfer.left);
  if (transfer.sends) {
    memcpy(transfer.mailbox->data, transfer.data, size);
    ++transfer.mailbox->sent;
  } else {
    memcpy(transfer.data, transfer.mailbox->data, size);
    ++transfer.mailbox->taken;
  }
  transfer.data += size;
  transfer.left -= size;
  transfer.ended = transfer.left == 0;
  ring(transfer.communicator);
  return true;
}

// Sends and receives of a group, each as far as it gets; those through one mailbox in their order.
void move_all() {
  std::vector<Transfer> pending = std::move(transfers);
  transfers.clear();
  while (!pending.empty() && !pending.front().communicator->aborted) {
    unsigned rung = *pending.front().communicator->bell;
    bool moved = false;
    std::set<std::pair<Mailbox*, bool>> busy;
    for (Transfer& transfer : pending) {
      bool first = busy.insert({transfer.mailbox, transfer.sends}).second;
      if (first) moved |= move(transfer);
    }
    pending.erase(std::remove_if(pending.begin(), pending.end(), [](Transfer& transfer) { return transfer.ended; }), pending.end());
    if (!moved) sleep(pending.front().communicator, rung);
  }
}

// Does a collective now, or at each replay of the graph that the stream records; never on a device that hangs.
template <class Work>
ncclResult_t enqueue(ncclComm_t handle, cudaStream_t stream, Work work) {
  Communicator* communicator = communicator_of(handle);
  if (communicator->aborted || communicator->error != ncclSuccess) return ncclInvalidUsage;
  auto now = [=] {
    if (standin::hung()) return ncclSuccess;
    bool fails = ++collectives == standin::fault("STANDIN_NCCL_FAIL", world_rank);
    ncclResult_t result = fails ? ncclRemoteError : work(communicator);
    if (communicator->aborted) return ncclSuccess;
    if (result != ncclSuccess) communicator->error = result;
    return result;
  };
  return standin::recorded(stream, [=] { now(); }) ? ncclSuccess : now();
}

ncclResult_t connect(ncclComm_t* handle, int size, const std::string& name, int rank) {
  const char* folder = getenv("STANDIN_NCCL");
  std::string file = std::string(folder ? folder : "/dev/shm") + "/" + name;
  size_t bytes = sizeof(Slot) * (size + 1) + sizeof(Mailbox) * size * size;
  int descriptor = open(file.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (descriptor < 0 || ftruncate(descriptor, bytes) != 0) return ncclSystemError;
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  close(descriptor);
  if (mapped == MAP_FAILED) return ncclSystemError;
  Slot* slots = static_cast<Slot*>(mapped);
  auto* communicator = new Communicator{name, rank, size, static_cast<std::atomic<unsigned>*>(mapped), slots + 1,
                                        reinterpret_cast<Mailbox*>(slots + 1 + size)};
  *handle = reinterpret_cast<ncclComm_t>(communicator);
  ncclResult_t met = exchange(communicator, &size, sizeof size, [](int, size_t, const char*, size_t) {});
  if (rank == 0) unlink(file.c_str());
  if (world_rank < 0) world_rank = rank;
  return met;
}

}  // namespace

API ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  unsigned long random[2];
  if (getrandom(random, sizeof random, 0) != sizeof random) return ncclSystemError;
  snprintf(id->internal, sizeof id->internal, "standin-nccl-%016lx%016lx", random[0], random[1]);
  return ncclSuccess;
}

API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError: return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    default: return "unknown result code";
  }
}

API const char* ncclGetLastError(ncclComm_t) { return "of the stand-in for NCCL"; }

API ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  *error = communicator_of(handle)->error;
  return ncclSuccess;
}

API ncclResult_t ncclCommInitRank(ncclComm_t* handle, int size, ncclUniqueId id, int rank) {
  return connect(handle, size, id.internal, rank);
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return connect(handle, size, id.internal, rank);
}

API ncclResult_t ncclCommInitRankScalable(ncclComm_t* handle, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return connect(handle, size, ids[0].internal, rank);
}

API ncclResult_t ncclCommSplit(ncclComm_t parent_handle, int color, int key, ncclComm_t* handle, ncclConfig_t*) {
  Communicator* parent = communicator_of(parent_handle);
  int own[2] = {color, key};
  int size = 0;
  int rank = 0;
  ncclResult_t result = exchange(parent, own, sizeof own, [&](int peer, size_t, const char* chunk, size_t) {
    int values[2];
    memcpy(values, chunk, sizeof values);
    if (values[0] != color) return;
    size++;
    rank += values[1] < key || (values[1] == key && peer < parent->rank);
  });
  std::string name = parent->name + "-" + std::to_string(parent->splits++) + "-" + std::to_string(color);
  *handle = nullptr;
  return result != ncclSuccess || color < 0 ? result : connect(handle, size, name, rank);
}

API ncclResult_t ncclCommAbort(ncclComm_t handle) {
  communicator_of(handle)->aborted = true;
  ring(communicator_of(handle));
  return ncclSuccess;
}

API ncclResult_t ncclCommCount(ncclComm_t handle, int* size) {
  *size = communicator_of(handle)->size;
  return ncclSuccess;
}

API ncclResult_t ncclCommUserRank(ncclComm_t handle, int* rank) {
  *rank = communicator_of(handle)->rank;
  return ncclSuccess;
}

API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* operation, void* factor, ncclDataType_t type, ncclScalarResidence_t, ncclComm_t) {
  *operation = static_cast<ncclRedOp_t>(ncclNumOps + factors.size());
  with_type(type, [&](auto narrow, auto) {
    memcpy(&narrow, factor, sizeof narrow);
    factors.push_back(narrow);
  });
  return ncclSuccess;
}

API ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t handle,
                               cudaStream_t stream) {
  return enqueue(handle, stream, [=](Communicator* communicator) {
    return reduce(communicator, from, static_cast<char*>(to), count, type, operation);
  });
}

API ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation, int root,
                            ncclComm_t handle, cudaStream_t stream) {
  return enqueue(handle, stream, [=](Communicator* communicator) {
    std::vector<char> total(count * width(type));
    ncclResult_t result = reduce(communicator, from, total.data(), count, type, operation);
    if (communicator->rank == root) memcpy(to, total.data(), total.size());
    return result;
  });
}

API ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t handle,
                                   cudaStream_t stream) {
  return enqueue(handle, stream, [=](Communicator* communicator) {
    size_t share = count * width(type);
    std::vector<char> total(share * communicator->size);
    ncclResult_t result = reduce(communicator, from, total.data(), count * communicator->size, type, operation);
    memcpy(to, total.data() + share * communicator->rank, share);
    return result;
  });
}

API ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t handle, cudaStream_t stream) {
  return enqueue(handle, stream, [=](Communicator* communicator) {
    size_t share = count * width(type);
    return exchange(communicator, from, share, [=](int rank, size_t offset, const char* chunk, size_t size) {
      memcpy(static_cast<char*>(to) + rank * share + offset, chunk, size);
    });
  });
}

API ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t handle,
                               cudaStream_t stream) {
  return enqueue(handle, stream, [=](Communicator* communicator) {
    const void* data = communicator->rank == root ? from : to;
    return exchange(communicator, data, count * width(type), [=](int rank, size_t offset, const char* chunk, size_t size) {
      if (rank == root) memcpy(static_cast<char*>(to) + offset, chunk, size);
    });
  });
}

API ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t handle, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, handle, stream);
}

API ncclResult_t ncclGroupStart() {
  group_depth++;
  return ncclSuccess;
}

API ncclResult_t ncclGroupEnd() {
  if (--group_depth == 0) move_all();
  return ncclSuccess;
}

namespace {

ncclResult_t begin_transfer(bool sends, void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t handle, cudaStream_t stream) {
  return enqueue(handle, stream, [=](Communicator* communicator) {
    int from = sends ? communicator->rank : peer;
    int to = sends ? peer : communicator->rank;
    Mailbox* mailbox = communicator->mailboxes + from * communicator->size + to;
    transfers.push_back({communicator, mailbox, sends, static_cast<char*>(data), count * width(type)});
    if (group_depth == 0) move_all();
    return ncclSuccess;
  });
}

}  // namespace

API ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t handle, cudaStream_t stream) {
  return begin_transfer(true, const_cast<void*>(data), count, type, peer, handle, stream);
}

API ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t handle, cudaStream_t stream) {
  return begin_transfer(false, data, count, type, peer, handle, stream);
}

API ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t handle, cudaStream_t stream) {
  size_t share = count * width(type);
  ncclGroupStart();
  for (int peer = 0; peer < communicator_of(handle)->size; peer++) {
    ncclSend(static_cast<const char*>(from) + share * peer, count, type, peer, handle, stream);
    ncclRecv(static_cast<char*>(to) + share * peer, count, type, peer, handle, stream);
  }
  return ncclGroupEnd();
}
