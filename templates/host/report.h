// Messages that end a run.
#pragma once

#include <string>
#include <vector>

#include "host/runtime.h"

namespace jitconv::host {

constexpr int EXIT_EMULATION_ERROR = 3;

// printf into a string.
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

// "templates/x.cu.j2:45"
std::string place(const Here& here);

// "0-31, 64": numbers in ascending order, consecutive ones as a range.
std::string ranges(const std::vector<int>& numbers);

// Something that is no error by itself but may explain one: fail() adds the first of them to its message.
void remark(const std::string& message);

// Writes the message, then which block, thread and schedule ran, and ends the program.
[[noreturn]] void fail(const std::string& message);

}  // namespace jitconv::host
