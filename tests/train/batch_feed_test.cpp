#include "train/batch_feed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "base/files.h"
#include "base/memory_cuda.h"
#include "base/random.h"
#include "data/token_file.h"
#include "support/temporary_folder.h"

namespace fenwick::train {
namespace {

using testing::HasSubstr;

class Feed : public testing::Test {
protected:
    void SetUp() override {
        data::TokenFileWriter writer(path_, *data::open_tokenizer("bytes"));
        Random random(1);
        for (int d = 0; d < 300; ++d) {
            std::vector<std::int32_t> ids(random.below(800));
            for (auto& id : ids) id = static_cast<std::int32_t>(random.below(256));
            writer.append(ids.data(), static_cast<std::int64_t>(ids.size()));
            writer.end_document(1, 1);
        }
        writer.finish();
    }
    data::LoaderOptions loader_options(data::Packing packing = data::Packing::documents) const {
        return {.corpora = {{path_}}, .sequence_length = 128, .packing = packing, .seed = 4};
    }
    test::TemporaryFolder folder_;
    std::string path_ = folder_ / "tokens.h5";
};

// The loader's rows, whoever prepares them and however far ahead, on any process, from any row.
TEST_F(Feed, GivesTheLoadersRows) {
    for (const auto packing : {data::Packing::stream, data::Packing::masked_stream, data::Packing::documents}) {
        const data::Loader loader(loader_options(packing));
        for (const std::int64_t prefetch : {0, 1, 2, 7})
            for (const std::int64_t processes : {1, 3}) {
                const std::int64_t batch_rows = 12, share = batch_rows / processes, micro = 2, start = 36;
                for (std::int64_t rank = 0; rank < processes; ++rank) {
                    BatchFeed feed(loader, {.device = cpu_device, .batch_rows = batch_rows, .first = rank * share, .share = share,
                                            .micro_rows = micro, .prefetch = prefetch}, start);
                    for (std::int64_t step = 0; step < 3; ++step)
                        for (std::int64_t row = 0; row < share; row += micro) {
                            const std::int64_t base = start + step * batch_rows;
                            const auto expected = loader.read(base + rank * share + row, micro);
                            const MicroBatch& batch = feed.next();
                            EXPECT_EQ(batch.inputs.shape(), (Shape{micro, 128}));
                            EXPECT_EQ(batch.inputs.to_vector<std::int32_t>(), expected.inputs);
                            EXPECT_EQ(batch.targets.to_vector<std::int32_t>(), expected.targets);
                            EXPECT_EQ(batch.layout.offsets(), expected.offsets);
                            EXPECT_EQ(batch.valid_targets, expected.valid_targets);
                            EXPECT_EQ(batch.step_targets, loader.valid_targets(base, batch_rows));
                        }
                }
            }
    }
}

// On a GPU, with work behind every batch that keeps it busy while the next ones are copied.
TEST_F(Feed, CudaCopiesNeverOvertakeTheWork) {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
    const Device gpu{DeviceType::cuda, 0};
    const data::Loader loader(loader_options());
    const Tensor busy = Tensor::full({std::int64_t{1} << 26}, 1.0, DType::float32, gpu);
    Tensor scratch = busy.clone();
    for (const std::int64_t prefetch : {0, 1, 2, 7}) {
        BatchFeed feed(loader, {.device = gpu, .batch_rows = 8, .first = 4, .share = 4, .micro_rows = 2, .prefetch = prefetch}, 0);
        std::vector<Tensor> kept;
        for (int i = 0; i < 60; ++i) {
            const MicroBatch& batch = feed.next();
            scratch.copy_from(busy);  // the batch is read after this, when the host has long asked for others
            kept.push_back(batch.inputs.clone());
            kept.push_back(batch.targets.clone());
        }
        for (int i = 0; i < 60; ++i) {
            const auto expected = loader.read(i / 2 * 8 + 4 + i % 2 * 2, 2);
            ASSERT_EQ(kept[static_cast<std::size_t>(2 * i)].to_vector<std::int32_t>(), expected.inputs) << "batch " << i;
            ASSERT_EQ(kept[static_cast<std::size_t>(2 * i + 1)].to_vector<std::int32_t>(), expected.targets) << "batch " << i;
        }
    }
}

// Ends at once whatever its thread is doing, also when nothing was taken.
TEST_F(Feed, EndsWhereItStands) {
    const data::Loader loader(loader_options());
    for (int i = 0; i < 200; ++i) {
        BatchFeed feed(loader, {.device = cpu_device, .batch_rows = 4, .first = 0, .share = 4, .micro_rows = 4, .prefetch = i % 5}, 0);
        for (int taken = 0; taken < i % 7; ++taken) feed.next();
    }
}

// A damaged chunk is told when its batch is due: those before it come whole, and asking again says the same.
TEST_F(Feed, AnErrorComesWithItsBatch) {
    std::string bytes = read_file(path_), pattern;
    std::vector<std::int32_t> ids(32);
    const std::int64_t damaged_token = 100000;
    data::TokenFile(path_).read(damaged_token, 32, ids.data());
    for (const auto id : ids) pattern += {static_cast<char>(id & 255), static_cast<char>(id >> 8)};
    const std::size_t at = bytes.find(pattern);
    ASSERT_NE(at, std::string::npos);
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    test::write_text(path_, bytes);
    auto options = loader_options(data::Packing::stream);
    options.shuffle = false;
    std::int64_t expected = -1;
    for (const std::int64_t prefetch : {0, 1, 4}) {
        const data::Loader loader(options);
        BatchFeed feed(loader, {.device = cpu_device, .batch_rows = 2, .first = 0, .share = 2, .micro_rows = 2, .prefetch = prefetch}, 0);
        std::int64_t batches = 0;
        const auto take = [&] { return test::error_of([&] { feed.next(); }); };
        std::string error;
        while ((error = take()).empty()) ++batches;
        EXPECT_THAT(error, HasSubstr(path_ + ": chunk 3 of 'tokens' (tokens 98304 to "));
        if (prefetch > 0) {
            EXPECT_EQ(take(), error);
        }
        if (expected >= 0) {
            EXPECT_EQ(batches, expected);
        }
        expected = batches;
    }
    EXPECT_EQ(expected, (98304 - 1) / 256);  // its last target is the chunk's first token
}

TEST_F(Feed, RefusesRowsOutsideTheBatch) {
    const data::Loader loader(loader_options());
    for (const auto& [first, share, micro] : {std::tuple{2, 4, 2}, std::tuple{0, 4, 3}, std::tuple{0, 0, 1}, std::tuple{-1, 2, 1}})
        EXPECT_THAT(test::error_of([&, f = first, s = share, m = micro] {
                        BatchFeed(loader, {.device = cpu_device, .batch_rows = 4, .first = f, .share = s, .micro_rows = m}, 0);
                    }),
                    HasSubstr("[batch feed] rows ["));
}

}  // namespace
}  // namespace fenwick::train
