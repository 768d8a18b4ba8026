#include "train/communicator.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "base/memory_cuda.h"

#ifdef FENWICK_HAVE_MPI
#include <mpi.h>
#endif
#ifdef FENWICK_HAVE_NCCL
#include "train/communicator_nccl.h"
#endif

namespace fenwick::train {
namespace {

class SingleProcess final : public Communicator {
public:
    int rank() const override { return 0; }
    int size() const override { return 1; }
    void all_reduce_sum(const Tensor&) override {}
    void broadcast(const Tensor&, int) override {}
    void barrier() override {}
};

// Processes that the launcher started; 0 if there was no launcher.
int launched_processes() {
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "MPI_LOCALNRANKS"})
        if (const char* text = std::getenv(name)) return std::max(1, std::atoi(text));
    return 0;
}

#ifdef FENWICK_HAVE_MPI

void check(int code, const char* call) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(code, text, &length);
    fail("[{}] {}", call, std::string(text, static_cast<std::size_t>(length)));
}

class Mpi final : public Communicator {
public:
    Mpi() {
        int provided = 0;
        check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
        check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
        check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
        check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
        MPI_Comm machine = MPI_COMM_NULL;
        check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &machine), "MPI_Comm_split_type");
        check(MPI_Comm_rank(machine, &local_rank_), "MPI_Comm_rank");
        check(MPI_Comm_free(&machine), "MPI_Comm_free");
    }
    // While an exception leaves this process, the others may be waiting in a collective call: MPI_Finalize would wait for
    // them for ever. Without it the launcher ends them when this process exits.
    ~Mpi() override {
        if (std::uncaught_exceptions() == 0) MPI_Finalize();
    }

    int rank() const override { return rank_; }
    int size() const override { return size_; }
    int local_rank() const override { return local_rank_; }

    void all_reduce_sum(const Tensor& values) override {
        if (size_ == 1) return;
        staged(values, [&](const Tensor& host) {
            host.dtype() == DType::float64 ? reduce<double>(host, MPI_DOUBLE) : reduce<float>(host, MPI_FLOAT);
        });
    }

    void broadcast(const Tensor& values, int root) override {
        if (size_ == 1) return;
        staged(values, [&](const Tensor& host) {
            auto* bytes = static_cast<char*>(host.data());
            for (std::size_t done = 0; done < host.bytes(); done += bucket_bytes)
                check(MPI_Bcast(bytes + done, static_cast<int>(std::min(bucket_bytes, host.bytes() - done)), MPI_BYTE, root,
                                MPI_COMM_WORLD), "MPI_Bcast");
        });
    }

    void barrier() override { check(MPI_Barrier(MPI_COMM_WORLD), "MPI_Barrier"); }

private:
    static constexpr std::size_t bucket_bytes = std::size_t{1} << 25;

    // Tensors of a GPU pass through host memory.
    template <class Body>
    void staged(const Tensor& values, Body&& body) {
        FENWICK_CHECK(values.is_contiguous() && (values.dtype() == DType::float32 || values.dtype() == DType::float64),
                      "[Communicator] a contiguous float32 or float64 tensor is needed, not {} {}", name_of(values.dtype()),
                      to_string(values.shape()));
        Tensor target = values;  // a view of the same memory
        const Tensor host = values.to(cpu_device);
        body(host);
        if (!values.device().is_cpu()) target.copy_from(host);
    }

    // In buckets, each cut into one slice a rank: rank r receives everybody's slice r, adds them up in the order of the
    // ranks (in float64, rounded once), and gives the sum back to all.
    template <class T>
    void reduce(const Tensor& host, MPI_Datatype type) {
        T* values = host.as<T>();
        const std::int64_t bucket = static_cast<std::int64_t>(bucket_bytes / sizeof(T));
        for (std::int64_t done = 0; done < host.count(); done += bucket) {
            const std::int64_t count = std::min(bucket, host.count() - done);
            const std::int64_t slice = (count + size_ - 1) / size_;
            std::vector<T> send(static_cast<std::size_t>(slice * size_), T{0}), received(send.size());
            std::copy_n(values + done, count, send.begin());
            check(MPI_Alltoall(send.data(), static_cast<int>(slice), type, received.data(), static_cast<int>(slice), type,
                               MPI_COMM_WORLD), "MPI_Alltoall");
            std::vector<T> sum(static_cast<std::size_t>(slice));
            for (std::size_t i = 0; i < sum.size(); ++i) {
                double total = 0;
                for (std::size_t r = 0; r < static_cast<std::size_t>(size_); ++r)
                    total += static_cast<double>(received[r * sum.size() + i]);
                sum[i] = static_cast<T>(total);
            }
            check(MPI_Allgather(sum.data(), static_cast<int>(slice), type, send.data(), static_cast<int>(slice), type,
                                MPI_COMM_WORLD), "MPI_Allgather");
            std::copy_n(send.begin(), count, values + done);
        }
    }

    int rank_ = 0, size_ = 1, local_rank_ = 0;
};

#endif  // FENWICK_HAVE_MPI

#ifdef FENWICK_HAVE_NCCL

bool wants_nccl(Communicator& start) {
    const char* text = std::getenv("FENWICK_NCCL");
    const std::string setting = text != nullptr ? text : "";
    if (setting == "0" || (start.size() == 1 && setting != "1")) return false;
    // All or none: processes that lack a GPU, or share one.
    const Tensor without = Tensor::full({1}, start.local_rank() < cuda_device_count() ? 0.0 : 1.0, DType::float64);
    start.all_reduce_sum(without);
    return without.item() == 0;
}

#endif  // FENWICK_HAVE_NCCL

std::unique_ptr<Communicator> over_nccl_if_wanted(std::unique_ptr<Communicator> start) {
#ifdef FENWICK_HAVE_NCCL
    if (wants_nccl(*start)) return with_nccl(std::move(start));
#endif
    return start;
}

}  // namespace

void together(Communicator& communicator, const std::function<void()>& body) {
    if (communicator.size() == 1) return body();
    bool failed = false;
    std::string message = "another process failed";
    try {
        body();
    } catch (const Error& error) {
        failed = true;
        message = error.what();
    }
    const Tensor failures = Tensor::full({2}, 0.0, DType::float64);  // of all processes, of rank 0
    failures.as<double>()[0] = failed ? 1 : 0;
    failures.as<double>()[1] = failed && communicator.is_root() ? 1 : 0;
    communicator.all_reduce_sum(failures);
    if (failures.as<double>()[0] == 0) return;
    throw SharedError(message, failed && (communicator.is_root() || failures.as<double>()[1] == 0));
}

std::unique_ptr<Communicator> single_process() { return std::make_unique<SingleProcess>(); }

std::unique_ptr<Communicator> make_communicator() {
    const int processes = launched_processes();
#ifdef FENWICK_HAVE_MPI
    if (processes > 0) return over_nccl_if_wanted(std::make_unique<Mpi>());
#else
    FENWICK_CHECK(processes <= 1, "{} processes were started, but this program was built without MPI; install libopenmpi-dev "
                  "and build it again", processes);
#endif
    return over_nccl_if_wanted(single_process());
}

}  // namespace fenwick::train
