#include "train/communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "support/random_tensor.h"

namespace fenwick::train {

// Shared by all tests of this binary that run under mpirun: MPI can be started once.
Communicator& mpi_world() {
    static const auto communicator = make_communicator();
    return *communicator;
}

namespace {

TEST(Communicator, OneProcess) {
    const auto communicator = single_process();
    EXPECT_EQ(communicator->rank(), 0);
    EXPECT_EQ(communicator->size(), 1);
    EXPECT_TRUE(communicator->is_root());
    const Tensor values = test::random_tensor({3}, 1);
    const auto before = values.to_vector<double>();
    communicator->all_reduce_sum(values);
    communicator->broadcast(values, 0);
    communicator->barrier();
    EXPECT_EQ(values.to_vector<double>(), before);
}

#define SKIP_UNLESS_MPI                              \
    if (mpi_world().size() == 1) GTEST_SKIP() << "runs under mpirun (ctest: train_mpi_2, train_mpi_4)"

TEST(Mpi, SumsInTheOrderOfTheRanks) {
    SKIP_UNLESS_MPI;
    Communicator& world = mpi_world();
    for (const std::int64_t count : {1, 2, 3, 1000, 9000001})  // the last needs several buckets
        for (const DType dtype : {DType::float32, DType::float64}) {
            if (count > 1000 && dtype == DType::float64) continue;
            const Tensor mine = test::random_tensor({std::min<std::int64_t>(count, 1000)}, 7 + static_cast<std::uint64_t>(world.rank()), dtype);
            Tensor values = Tensor::zeros({count}, dtype);
            for (const std::int64_t at : {std::int64_t{0}, count - mine.count()})
                values.narrow_rows(at, at + mine.count()).copy_from(mine);
            world.all_reduce_sum(values);
            std::vector<double> expected(static_cast<std::size_t>(mine.count()), 0.0);
            for (int rank = 0; rank < world.size(); ++rank) {
                const auto theirs = test::random_tensor({mine.count()}, 7 + static_cast<std::uint64_t>(rank), dtype).to_vector<double>();
                for (std::size_t i = 0; i < theirs.size(); ++i) expected[i] += theirs[i];
            }
            if (dtype == DType::float32)
                for (auto& value : expected) value = static_cast<double>(static_cast<float>(value));
            EXPECT_EQ(values.narrow_rows(0, mine.count()).to_vector<double>(), expected);
            EXPECT_EQ(values.narrow_rows(count - mine.count(), count).to_vector<double>(), expected);
            if (count > 2000) {
                EXPECT_EQ(values.narrow_rows(5000, 5001).item(), 0.0);
            }
        }
}

TEST(Mpi, Broadcasts) {
    SKIP_UNLESS_MPI;
    Communicator& world = mpi_world();
    for (int root = 0; root < world.size(); ++root) {
        const Tensor values = Tensor::full({5}, world.rank(), DType::float32);
        world.broadcast(values, root);
        EXPECT_EQ(values.to_vector<double>(), std::vector<double>(5, root));
    }
    world.barrier();
}

// A failure of all, of rank 0 alone, or of the last rank alone reaches every process, and is told once for each cause.
TEST(Mpi, AFailureIsSharedAndToldOnce) {
    SKIP_UNLESS_MPI;
    Communicator& world = mpi_world();
    const int last = world.size() - 1;
    EXPECT_NO_THROW(together(world, [] {}));
    for (const int failing : {-1, 0, last}) {  // -1: all
        const bool mine = failing < 0 || failing == world.rank();
        try {
            together(world, [&] {
                if (mine) fail("broken");
            });
            ADD_FAILURE() << "nothing was thrown";
        } catch (const SharedError& error) {
            EXPECT_EQ(error.speaks, world.rank() == std::max(failing, 0)) << failing;
            EXPECT_STREQ(error.what(), mine ? "broken" : "another process failed");
        }
    }
}

TEST(Communicator, ASingleProcessKeepsItsError) {
    const auto alone = single_process();
    try {
        together(*alone, [] { fail("broken"); });
        FAIL();
    } catch (const SharedError&) {
        FAIL();
    } catch (const Error& error) {
        EXPECT_STREQ(error.what(), "broken");
    }
}

TEST(Mpi, RefusesTensorsItCannotSum) {
    SKIP_UNLESS_MPI;
    EXPECT_THROW(mpi_world().all_reduce_sum(Tensor::zeros({3}, DType::int32)), Error);
}

}  // namespace
}  // namespace fenwick::train
