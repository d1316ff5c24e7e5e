// The global memory of a job: buffers that end exactly where the tensors end.
#pragma once

#include <string>

namespace jitconv::host {

// Whether all of the bytes lie in one buffer.
bool is_global(const void* pointer, unsigned bytes);

// The nearest memory in words: "buffer 1 of 4096 bytes, offset 4100", "shared memory of 256 bytes, offset -4".
std::string describe_address(const void* pointer);

}  // namespace jitconv::host
