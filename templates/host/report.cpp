#include "host/report.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "host/block.h"

namespace jitconv::host {

namespace {
std::string first_remark;
}

std::string text(const char* format, ...) {
    char buffer[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    return buffer;
}

std::string place(const Here& here) { return text("%s:%d", here.file, here.line); }

std::string ranges(const std::vector<int>& numbers) {
    std::string result;
    for (size_t i = 0; i < numbers.size();) {
        size_t last = i;
        while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) {
            ++last;
        }
        result += text(last > i ? "%s%d-%d" : "%s%d", result.empty() ? "" : ", ", numbers[i], numbers[last]);
        i = last + 1;
    }
    return result;
}

void remark(const std::string& message) {
    if (first_remark.empty()) {
        first_remark = message;
    }
}

void fail(const std::string& message) {
    fprintf(stderr, "emulator: %s\n", message.c_str());
    if (!first_remark.empty()) {
        fprintf(stderr, "emulator: it may be because of this: %s\n", first_remark.c_str());
    }
    print_position();
    // Not exit(): the fibers' frames hold objects that nobody will come back for.
    _exit(EXIT_EMULATION_ERROR);
}

}  // namespace jitconv::host
