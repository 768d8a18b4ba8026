// Host memory from which a GPU is filled while it works.
#pragma once

#include <cstddef>

#include "base/device.h"
#include "base/memory.h"

namespace fenwick {

// A block of host memory and its copies into memory of a device: page-locked for a GPU, whose copies run on a stream of their
// own beside its work. One thread fills and uploads, another uses what arrived; who holds the block is theirs to agree on.
//   the first:  wait_until_free(), write host(), upload(to)
//   the other:  acquire(), queue work that reads `to`, release()
// On the CPU a copy is done when upload() returns, and the rest is nothing.
class StagingBuffer {
public:
    StagingBuffer(Device device, std::size_t bytes);
    ~StagingBuffer();  // waits for the last copy: `to` may go then
    StagingBuffer(const StagingBuffer&) = delete;
    StagingBuffer& operator=(const StagingBuffer&) = delete;

    void* host() const { return host_; }
    std::size_t bytes() const { return bytes_; }

    void wait_until_free();  // until the last copy has read host()
    void upload(void* to);   // all bytes; the copy begins when what was queued before the last release() is done
    void acquire();          // work that is queued on the device from here on sees the copy
    void release();          // work that was queued until here is the last that uses it

private:
    Device device_;
    std::size_t bytes_;
    Buffer memory_;  // on the CPU
    void* host_;
    void *uploaded_ = nullptr, *released_ = nullptr;  // events of a GPU
};

}  // namespace fenwick
