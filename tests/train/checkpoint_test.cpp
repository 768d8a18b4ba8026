#include "train/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "base/files.h"
#include "base/hdf5.h"
#include "support/damage.h"
#include "support/random_tensor.h"

namespace fenwick::train {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::StartsWith;

constexpr const char* config_text = R"(run_dir: r
model: {type: mamba2, hidden_size: 64, num_layers: 1, num_heads: 2, head_dim: 64}
data: {train: a.h5, sequence_length: 8}
train: {steps: 4}
)";

template <class Body>
std::string error_of(Body&& body) {
    try {
        body();
    } catch (const Error& error) {
        return error.what();
    }
    return "no error";
}

struct Checkpoint : testing::Test {
    fs::path folder = fs::path(testing::TempDir()) / fmt::format("fenwick_checkpoint_{}", getpid());
    std::string path = checkpoint_path(folder.string(), 7);
    CheckpointHeader header{.step = 7,
                            .tokens = 1234,
                            .loader = {.epoch = 2, .row = 5, .data = "d1"},
                            .config = config_text,
                            .tokenizer = {"sentencepiece", "abc", std::string("\0\1binary\xff", 9)}};

    void SetUp() override {
        fs::remove_all(folder);
        fs::create_directories(folder);
    }
    void TearDown() override { fs::remove_all(folder); }

    static Optimizer optimizer(std::uint64_t seed, DType dtype = DType::float32, Shape last = {70}) {
        std::vector<model::Parameter> parameters{
            {"layers.0.weight", Variable(test::random_tensor({3, 5}, seed, dtype), true), true},
            {"layers.0.norm", Variable(test::random_tensor(last, seed + 1, dtype), true), false}};
        Optimizer optimizer(std::move(parameters), {});
        for (std::size_t i = 0; i < 2; ++i) {
            optimizer.first_moment(i).copy_from(test::random_tensor(optimizer.first_moment(i).shape(), seed + 2 + i, dtype));
            optimizer.second_moment(i).copy_from(test::random_tensor(optimizer.first_moment(i).shape(), seed + 4 + i, dtype));
        }
        return optimizer;
    }
    static std::vector<double> everything(const Optimizer& optimizer) {
        std::vector<double> all;
        for (std::size_t i = 0; i < optimizer.parameters().size(); ++i)
            for (const Tensor& tensor :
                 {optimizer.parameters()[i].variable.value(), optimizer.first_moment(i), optimizer.second_moment(i)})
                for (const double value : tensor.to_vector<double>()) all.push_back(value);
        return all;
    }
    void flip_byte(std::size_t at) const {
        std::string bytes = read_file(path);
        bytes.at(at) = static_cast<char>(bytes[at] ^ 0x10);
        write_file_atomically(path, bytes);
    }
};

TEST_F(Checkpoint, RoundTrip) {
    for (const DType dtype : {DType::float32, DType::float64}) {
        const Optimizer written = optimizer(1, dtype);
        save_checkpoint(path, header, written);
        EXPECT_FALSE(fs::exists(path + ".tmp"));
        Optimizer read = optimizer(50, dtype);
        load_checkpoint(path, read);
        EXPECT_EQ(everything(read), everything(written));
        const CheckpointHeader again = read_checkpoint_header(path);
        EXPECT_EQ(again.step, 7);
        EXPECT_EQ(again.tokens, 1234);
        EXPECT_EQ(again.loader, header.loader);
        EXPECT_EQ(again.config, header.config);
        EXPECT_EQ(again.tokenizer.kind, "sentencepiece");
        EXPECT_EQ(again.tokenizer.identity, "abc");
        EXPECT_EQ(again.tokenizer.definition, header.tokenizer.definition);
        verify_checkpoint(path);
    }
    // Checkpoints of before the data was noted
    CheckpointHeader older = header;
    older.loader.data.clear();
    save_checkpoint(path, older, optimizer(1));
    EXPECT_EQ(read_checkpoint_header(path).loader, older.loader);
    save_checkpoint(path, header, optimizer(1, DType::float64));
    // The same state gives the same bytes.
    const std::string bytes = read_file(path);
    save_checkpoint(path, header, optimizer(1, DType::float64));
    EXPECT_EQ(read_file(path), bytes);
}

TEST_F(Checkpoint, DamageIsFoundAndNamed) {
    save_checkpoint(path, header, optimizer(1));
    const std::string bytes = read_file(path);
    const auto values = optimizer(1).second_moment(1).to_vector<float>();
    const std::string_view needle(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    const std::size_t at = bytes.find(needle);
    ASSERT_NE(at, std::string::npos);
    flip_byte(at + 40);
    const std::string expected =
        path + ": 'optimizer/second_moment/layers.0.norm' is damaged (its checksum does not fit)";
    EXPECT_EQ(error_of([&] { verify_checkpoint(path); }), expected);
    Optimizer target = optimizer(2);
    EXPECT_EQ(error_of([&] { load_checkpoint(path, target); }), expected);

    write_file_atomically(path, bytes);
    flip_byte(bytes.find("hidden_size"));
    EXPECT_EQ(error_of([&] { read_checkpoint_header(path); }),
              path + ": object '/' cannot be opened: the file is damaged (a checksum does not fit)");

    for (const std::size_t length : {bytes.size() - 1, bytes.size() / 2, std::size_t{100}, std::size_t{0}}) {
        write_file_atomically(path, std::string_view(bytes).substr(0, length));
        EXPECT_THAT(error_of([&] { verify_checkpoint(path); }), StartsWith(path)) << length;
    }
}

// Every byte of it: an Error of one line, or what was saved.
TEST_F(Checkpoint, NoDamagedByteGivesAnotherState) {
    save_checkpoint(path, header, optimizer(1));
    const std::vector<double> saved = everything(optimizer(1));
    Optimizer target = optimizer(2);
    int checked = 0, refused = 0;
    test::for_each_damaged_byte(
        path, [](std::size_t) { return 1; },
        [&](std::size_t position) {
            ++checked;
            const std::string error = error_of([&] {
                const CheckpointHeader found = read_checkpoint_header(path);
                EXPECT_TRUE(found.step == header.step && found.loader == header.loader && found.config == header.config)
                    << position;
                load_checkpoint(path, target);
                EXPECT_EQ(everything(target), saved) << position;
            });
            EXPECT_EQ(error.find('\n'), std::string::npos) << error;
            EXPECT_TRUE(error == "no error" || error.starts_with(path)) << error;
            refused += error != "no error";
        });
    EXPECT_GT(refused, checked / 2);
    verify_checkpoint(path);
}

TEST_F(Checkpoint, ForeignAndIncompleteFilesAreRefused) {
    {
        hdf5::File file = hdf5::File::create(path);
        const float value = 1;
        file.write("weights/x", &value, {1});
        file.close();
    }
    EXPECT_EQ(error_of([&] { read_checkpoint_header(path); }), path + ": an HDF5 file, but not a checkpoint of fenwick");
    {
        hdf5::File file = hdf5::File::open_append(path);
        file.set_attribute("/", "format", "fenwick-checkpoint");
        file.set_attribute("/", "version", std::int64_t{1});
        file.close();
    }
    EXPECT_EQ(error_of([&] { read_checkpoint_header(path); }),
              path + ": the checkpoint is not complete (writing it was interrupted)");
    write_file_atomically(path, "some text");
    EXPECT_THAT(error_of([&] { read_checkpoint_header(path); }), StartsWith(path));
    EXPECT_THAT(error_of([&] { load_model((folder / "absent.h5").string()); }), HasSubstr("absent.h5"));
    EXPECT_THAT(error_of([&] { load_model(folder.string()); }), HasSubstr("no complete checkpoint"));
}

TEST_F(Checkpoint, AnotherModelIsNamed) {
    save_checkpoint(path, header, optimizer(1));
    Optimizer other = optimizer(1, DType::float32, {71});
    EXPECT_EQ(error_of([&] { load_checkpoint(path, other); }),
              path + ": checkpoint of another model: tensor 'weights/layers.0.norm' is [70] there, [71] here");
    Optimizer more({{"layers.9.weight", Variable(test::random_tensor({2}, 1, DType::float32), true), true}}, {});
    EXPECT_EQ(error_of([&] { load_checkpoint(path, more); }),
              path + ": checkpoint of another model: tensor 'weights/layers.9.weight' is missing");
    Optimizer fewer({{"layers.0.weight", Variable(test::random_tensor({3, 5}, 1, DType::float32), true), true}}, {});
    EXPECT_EQ(error_of([&] { load_checkpoint(path, fewer); }),
              path + ": checkpoint of another model: it has 2 tensors, this model 1");

    const auto ours = [](const std::string& assignment) { return parse_config(config_text, "c.yaml", {assignment}); };
    EXPECT_EQ(error_of([&] { check_same_model(path, header, ours("model.hidden_size=128")); }),
              path + ": checkpoint of another model: model.hidden_size is 64 there, 128 here");
    EXPECT_EQ(error_of([&] { check_same_model(path, header, ours("model.type=transformer")); }),
              path + ": checkpoint of another model: model.type is mamba2 there, transformer here");
    check_same_model(path, header, ours("model.chunk_size=16"));
    check_same_model(path, header, ours("train.steps=9"));
}

TEST_F(Checkpoint, NewestCompleteOneAndRotation) {
    EXPECT_EQ(latest_complete(folder.string()), std::nullopt);
    EXPECT_EQ(latest_complete((folder / "absent").string()), std::nullopt);
    const auto save = [&](std::int64_t named, std::int64_t step) {
        CheckpointHeader own = header;
        own.step = step;
        save_checkpoint(checkpoint_path(folder.string(), named), own, optimizer(1));
    };
    for (const std::int64_t step : {9, 10, 100}) save(step, step);
    std::ofstream(folder / "step_x.h5") << "not one of ours";
    std::ofstream(folder / "step_200.h5.tmp") << "left over";
    EXPECT_EQ(checkpoint_steps(folder.string()), (std::vector<std::int64_t>{9, 10, 100}));
    EXPECT_EQ(latest_complete(folder.string()), checkpoint_path(folder.string(), 100));
    fs::resize_file(checkpoint_path(folder.string(), 100), 3000);
    EXPECT_EQ(latest_complete(folder.string()), checkpoint_path(folder.string(), 10));
    // A checkpoint under another step's name is none of this run's.
    save(300, 10);
    EXPECT_EQ(latest_complete(folder.string()), checkpoint_path(folder.string(), 10));
    fs::remove(checkpoint_path(folder.string(), 300));
    // The run was resumed from 10 and wrote 12: the damaged one of a later step goes, and counts for nothing.
    save(12, 12);
    rotate_checkpoints(folder.string(), 12, 2);
    EXPECT_EQ(checkpoint_steps(folder.string()), (std::vector<std::int64_t>{10, 12}));
    for (const std::int64_t keep : {std::int64_t{5}, std::int64_t{1} << 40, std::int64_t{1}}) {
        rotate_checkpoints(folder.string(), 12, keep);
        EXPECT_EQ(checkpoint_steps(folder.string()), (keep > 1 ? std::vector<std::int64_t>{10, 12} : std::vector<std::int64_t>{12}));
    }
}

TEST_F(Checkpoint, APathMayBeABareNameOrNameFoldersThatAreNotThere) {
    const fs::path before = fs::current_path();
    fs::current_path(folder);
    for (const std::string name : {"bare.h5", "./dot.h5", "new/folder/in.h5"}) {
        save_checkpoint(name, header, optimizer(1));
        verify_checkpoint(name);
    }
    fs::current_path(before);
    EXPECT_TRUE(fs::exists(folder / "bare.h5"));
}

TEST_F(Checkpoint, FullDiskLeavesTheOneBefore) {
    const std::string before = checkpoint_path(folder.string(), 6);
    save_checkpoint(before, header, optimizer(1));
    const std::string bytes = read_file(before);
    // No file may grow past this: writing fails in the middle, as on a full disk.
    rlimit old_limit{};
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
    const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
    for (const std::size_t size : {std::size_t{0}, std::size_t{1000}, bytes.size() / 2, bytes.size() - 1}) {
        rlimit limit = old_limit;
        limit.rlim_cur = size;
        ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
        const std::string error = error_of([&] { save_checkpoint(path, header, optimizer(3)); });
        const std::string same_name = error_of([&] { save_checkpoint(before, header, optimizer(3)); });
        setrlimit(RLIMIT_FSIZE, &old_limit);
        EXPECT_THAT(error, StartsWith(path + ": the checkpoint of step 7 could not be written (")) << size;
        EXPECT_EQ(error.find('\n'), std::string::npos);
        EXPECT_THAT(same_name, StartsWith(before + ": the checkpoint of step 7"));
        EXPECT_FALSE(fs::exists(path) || fs::exists(path + ".tmp") || fs::exists(before + ".tmp"));
        EXPECT_EQ(read_file(before), bytes);
    }
    std::signal(SIGXFSZ, old_handler);
    save_checkpoint(path, header, optimizer(3));
    verify_checkpoint(path);
}

}  // namespace
}  // namespace fenwick::train
