#include "base/staging.h"

#include "base/memory_cuda.h"

namespace fenwick {

StagingBuffer::StagingBuffer(Device device, std::size_t bytes) : device_(device), bytes_(bytes) {
    if (device.is_cpu()) {
        memory_ = Buffer(device, bytes, MemoryKind::data);
        host_ = memory_.data();
        return;
    }
    uploaded_ = detail::cuda_event_create(device.index);
    released_ = detail::cuda_event_create(device.index);
    host_ = detail::cuda_allocate_host(device.index, bytes);
    release();  // memory that was allocated before, in the order of the stream, is there when the first copy begins
}

StagingBuffer::~StagingBuffer() {
    if (device_.is_cpu()) return;
    detail::cuda_event_wait_noexcept(uploaded_);
    detail::cuda_event_destroy(uploaded_);
    detail::cuda_event_destroy(released_);
    detail::cuda_release_host(host_);
}

void StagingBuffer::wait_until_free() {
    if (device_.is_cuda()) detail::cuda_event_wait(uploaded_);
}

void StagingBuffer::upload(void* to) {
    if (device_.is_cpu())
        copy_bytes(device_, to, device_, host_, bytes_);
    else
        detail::cuda_upload(device_.index, to, host_, bytes_, released_, uploaded_);
}

void StagingBuffer::acquire() {
    if (device_.is_cuda()) detail::cuda_stream_wait(device_.index, uploaded_);
}

void StagingBuffer::release() {
    if (device_.is_cuda()) detail::cuda_event_record(device_.index, released_);
}

}  // namespace fenwick
