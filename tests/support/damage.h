// Files with one byte that is another one than was written.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <stdexcept>
#include <string>

#include "base/files.h"

namespace fenwick::test {

// Sets the bytes of the file, one at a time, to 0, to 255 or to themselves with one bit flipped (the first 64 to each of
// these, the others in turn), calls check(position), and puts the byte back. `step(position)` says how many bytes further
// the next position is.
template <class Step, class Check>
void for_each_damaged_byte(const std::string& path, Step&& step, Check&& check) {
    const std::string bytes = read_file(path);
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    const auto put = [&](std::size_t position, char byte) {
        if (::pwrite(file, &byte, 1, static_cast<off_t>(position)) != 1)
            throw std::runtime_error(path + ": cannot be damaged");
    };
    std::size_t turn = 0;
    for (std::size_t i = 0; i < bytes.size(); i += step(i), ++turn) {
        const std::array<char, 3> others{'\0', '\xff', static_cast<char>(bytes[i] ^ (1 << i % 8))};
        for (std::size_t kind = 0; kind < others.size(); ++kind) {
            if (others[kind] == bytes[i] || (i >= 64 && kind != turn % 3)) continue;
            put(i, others[kind]);
            check(i);
        }
        put(i, bytes[i]);
    }
    ::close(file);
}

}  // namespace fenwick::test
