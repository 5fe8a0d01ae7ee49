// What nccl.cpp needs of cuda.cpp.
#pragma once
#include <cstddef>
#include <functional>

#define API extern "C" __attribute__((visibility("default")))

namespace standin {

// Whether a kernel spins for ever on the GPU of this process: nothing that is issued after it is ever done.
bool hung();

// If the stream records a graph, keeps the work for the graph's replays and returns true.
bool recorded(void* stream, std::function<void()> work);

// A fault "WHO:N" of the environment: N if it is meant for `who`, else -1.
long fault(const char* variable, int who);

}  // namespace standin
