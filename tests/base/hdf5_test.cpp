#include "base/hdf5.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hdf5.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "base/files.h"
#include "support/temporary_folder.h"

namespace fenwick {
namespace {

using hdf5::ElementType;
using hdf5::File;
using test::error_of;
using testing::ElementsAre;
using testing::HasSubstr;

template <class T>
class Hdf5Types : public testing::Test {};
using Types = testing::Types<float, double, std::int64_t, std::int32_t, std::uint16_t, std::uint32_t, std::uint64_t, std::uint8_t>;
TYPED_TEST_SUITE(Hdf5Types, Types);

TYPED_TEST(Hdf5Types, RoundTrip) {
    test::TemporaryFolder folder;
    std::vector<TypeParam> values(24);
    std::iota(values.begin(), values.end(), TypeParam{1});
    values.back() = std::numeric_limits<TypeParam>::max();
    {
        File file = File::create(folder / "a.h5");
        file.write("x/y/values", values.data(), {2, 3, 4});
        file.create_appendable<TypeParam>("growing", 5, 6);
        file.append("growing", values.data(), 7);
        file.append("growing", values.data() + 7, 17);
        file.close();
    }
    const File file = File::open(folder / "a.h5");
    EXPECT_EQ(file.info("x/y/values").shape, (std::vector<std::int64_t>{2, 3, 4}));
    EXPECT_EQ(file.info("x/y/values").count(), 24);
    EXPECT_NE(file.info("x/y/values").type, ElementType::other);
    EXPECT_EQ(file.info("growing").type, file.info("x/y/values").type);
    EXPECT_EQ(file.read<TypeParam>("x/y/values"), values);
    EXPECT_EQ(file.read<TypeParam>("growing"), values);
    std::vector<TypeParam> part(4);
    file.read_slice("growing", 6, 4, part.data());
    EXPECT_EQ(part, std::vector<TypeParam>(values.begin() + 6, values.begin() + 10));
    std::vector<TypeParam> whole(24);
    file.read_into("x/y/values", whole.data(), 24);
    EXPECT_EQ(whole, values);
}

TEST(Hdf5, EmptyAndScalarDatasets) {
    test::TemporaryFolder folder;
    const double number = 2.5;
    {
        File file = File::create(folder / "a.h5");
        file.write<double>("empty", nullptr, {0, 3});
        file.write("scalar", &number, {});
        file.create_appendable<double>("nothing", 8, 0);
        file.append<double>("nothing", nullptr, 0);
        file.close();
    }
    const File file = File::open(folder / "a.h5");
    EXPECT_TRUE(file.read<double>("empty").empty());
    EXPECT_TRUE(file.read<double>("nothing").empty());
    EXPECT_THAT(file.read<double>("scalar"), ElementsAre(2.5));
    EXPECT_TRUE(file.info("scalar").shape.empty());
}

TEST(Hdf5, ConvertsNumbersAndRefusesWhatDoesNotFit) {
    test::TemporaryFolder folder;
    const std::int64_t large[] = {1, 70000};
    const double real[] = {1.5, 2.5};
    {
        File file = File::create(folder / "a.h5");
        file.write("large", large, {2});
        file.write("real", real, {2});
        file.close();
    }
    const File file = File::open(folder / "a.h5");
    EXPECT_THAT(file.read<std::int32_t>("large"), ElementsAre(1, 70000));
    EXPECT_THAT(file.read<double>("large"), ElementsAre(1.0, 70000.0));
    EXPECT_THAT(file.read<float>("real"), ElementsAre(1.5f, 2.5f));
    EXPECT_THAT(error_of([&] { file.read<std::uint16_t>("large"); }), HasSubstr("dataset 'large' cannot be read"));
    EXPECT_THAT(error_of([&] { file.read<std::int64_t>("real"); }), HasSubstr("dataset 'real' does not hold integers"));
}

TEST(Hdf5, NamesGroupsAndLists) {
    test::TemporaryFolder folder;
    const std::uint8_t byte = 1;
    File file = File::create(folder / "a.h5");
    file.write("b/z", &byte, {1});
    file.write("b/a/deep", &byte, {1});
    file.write("a", &byte, {1});
    file.create_group("empty/inner");
    file.create_group("empty/inner");
    EXPECT_TRUE(file.exists("b"));
    EXPECT_TRUE(file.exists("/"));
    EXPECT_TRUE(file.exists("b/a/deep"));
    EXPECT_FALSE(file.exists("b/q/deep"));
    EXPECT_FALSE(file.exists("a/deep"));
    EXPECT_TRUE(file.is_dataset("b/z"));
    EXPECT_FALSE(file.is_dataset("b"));
    EXPECT_THAT(file.list("/"), ElementsAre("a", "b", "empty"));
    EXPECT_THAT(file.list("b"), ElementsAre("a", "z"));
    EXPECT_THAT(file.all_datasets("b"), ElementsAre("a/deep", "z"));
    EXPECT_THAT(file.all_datasets("/"), ElementsAre("a", "b/a/deep", "b/z"));
    EXPECT_THAT(error_of([&] { file.write("a", &byte, {1}); }), HasSubstr("'a' exists already"));
}

TEST(Hdf5, Attributes) {
    test::TemporaryFolder folder;
    {
        File file = File::create(folder / "a.h5");
        file.create_group("g");
        file.set_attribute("/", "text", std::string_view("naïve"));
        file.set_attribute("/", "text", std::string_view("longer than before"));
        file.set_attribute("/", "empty", std::string_view(""));
        file.set_attribute("g", "count", std::int64_t{1} << 60);
        file.set_attribute("g", "rate", 0.1);
        EXPECT_THAT(error_of([&] { file.set_attribute("/", "big", std::string(70000, 'x')); }), HasSubstr("write a dataset"));
        file.close();
    }
    const File file = File::open(folder / "a.h5");
    EXPECT_EQ(file.attribute_string("/", "text"), "longer than before");
    EXPECT_EQ(file.attribute_string("/", "empty"), "");
    EXPECT_EQ(file.attribute_int("g", "count"), std::int64_t{1} << 60);
    EXPECT_EQ(file.attribute_double("g", "rate"), 0.1);
    EXPECT_EQ(file.attribute_double("g", "count"), 0x1p60);
    EXPECT_TRUE(file.has_attribute("g", "rate"));
    EXPECT_FALSE(file.has_attribute("g", "text"));
    EXPECT_FALSE(file.has_attribute("nowhere", "text"));
    EXPECT_EQ(error_of([&] { file.attribute_string("g", "no"); }), file.path() + ": attribute 'no' of 'g' is missing");
    EXPECT_THAT(error_of([&] { file.attribute_int("/", "text"); }), HasSubstr("is not one integer"));
    EXPECT_THAT(error_of([&] { file.attribute_int("g", "rate"); }), HasSubstr("is not one integer"));
    EXPECT_THAT(error_of([&] { file.attribute_string("g", "rate"); }), HasSubstr("is not one string"));
}

TEST(Hdf5, SaysWhatIsWrongWithAFile) {
    test::TemporaryFolder folder;
    const std::string path = folder / "a.h5", text = folder / "text.h5", none = folder / "none.h5", empty = folder / "empty.h5";
    EXPECT_EQ(error_of([&] { File::open(none); }), none + ": no such file");
    test::write_text(text, "not at all\n");
    EXPECT_EQ(error_of([&] { File::open(text); }), text + " is not an HDF5 file");
    test::write_text(empty, "");
    EXPECT_EQ(error_of([&] { File::open(empty); }), empty + " is not an HDF5 file");
    EXPECT_EQ(error_of([&] { File::open(folder.path()); }), folder.path() + " is a folder; an HDF5 file is needed");
    EXPECT_THAT(error_of([&] { File::create(folder / "no/where.h5"); }), HasSubstr("cannot be created: No such file or directory"));
    {
        const std::vector<double> values(10000, 1.0);
        File file = File::create(path);
        file.write("group/values", values.data(), {100, 100});
        file.close();
    }
    {
        const File file = File::open(path);
        std::vector<double> out(10001);
        EXPECT_EQ(error_of([&] { file.read<double>("other"); }), path + ": dataset 'other' is missing");
        EXPECT_EQ(error_of([&] { file.read<double>("group"); }), path + ": 'group' is a group; a dataset is needed");
        EXPECT_EQ(error_of([&] { file.read_into("group/values", out.data(), 10001); }),
                  path + ": dataset 'group/values' has 10000 elements (shape [100, 100]); 10001 are needed");
        EXPECT_THAT(error_of([&] { file.read_slice("group/values", 0, 5, out.data()); }), HasSubstr("one dimension is needed"));
    }
    std::filesystem::resize_file(path, 40000);
    EXPECT_THAT(error_of([&] { File::open(path); }), HasSubstr(path + ": cannot be opened: the file is cut off"));
    std::filesystem::resize_file(path, 4);
    EXPECT_EQ(error_of([&] { File::open(path); }), path + " is not an HDF5 file");
}

TEST(Hdf5, SliceOutsideIsRefused) {
    test::TemporaryFolder folder;
    const std::int32_t values[] = {1, 2, 3};
    File file = File::create(folder / "a.h5");
    file.write("v", values, {3});
    std::int32_t out[8];
    for (const auto& [offset, count] : {std::pair{0, 4}, {3, 1}, {-1, 2}, {0, -1}, {4, 0}})
        EXPECT_THAT(error_of([&, first = offset, n = count] { file.read_slice("v", first, n, out); }), HasSubstr("it has 3"));
    file.read_slice("v", 3, 0, out);
}

TEST(Hdf5, AppendsToAnExistingFile) {
    test::TemporaryFolder folder;
    const std::int32_t values[] = {1, 2, 3};
    {
        File file = File::create(folder / "a.h5");
        file.create_appendable<std::int32_t>("v", 2, 0);
        file.append("v", values, 3);
        file.close();
    }
    File file = File::open_append(folder / "a.h5");
    file.append("v", values, 2);
    EXPECT_THAT(file.read<std::int32_t>("v"), ElementsAre(1, 2, 3, 1, 2));
    file.close();
    EXPECT_NE(error_of([&] { File::open(folder / "a.h5").append("v", values, 1); }), "");
}

// Chunks that deflate makes smaller and those that it does not, beside what the library's own filters wrote.
TYPED_TEST(Hdf5Types, ChunksAreCompressedOnThreads) {
    test::TemporaryFolder folder;
    std::vector<TypeParam> values(64 * 20 + 5);
    std::uint64_t state = 1;
    for (std::size_t i = 0; i < values.size(); ++i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        values[i] = i / 64 % 3 == 0 ? static_cast<TypeParam>(i % 5) : static_cast<TypeParam>(state >> 57);
    }
    for (const int threads : {1, 3, 50}) {
        {
            File file = File::create(folder / "a.h5");
            file.create_appendable<TypeParam>("v", 64, 6);
            file.append("v", values.data(), 64);
            file.append_chunks("v", values.data() + 64, 64 * 12, threads);
            file.append_chunks("v", values.data() + 64 * 13, 64 * 7, threads);
            EXPECT_THAT(error_of([&] { file.append_chunks("v", values.data(), 63, threads); }),
                        HasSubstr("are not whole chunks of 64"));
            file.append("v", values.data() + 64 * 20, 5);
            file.close();
        }
        EXPECT_EQ(File::open(folder / "a.h5").read<TypeParam>("v"), values);
    }
}

// As h5py and others write them unless told otherwise; ours have superblock version 3, whose structures carry checksums.
TEST(Hdf5, ReadsAndExtendsFilesOfTheOldestFormat) {
    test::TemporaryFolder folder;
    const std::string path = folder / "old.h5";
    const std::int32_t values[] = {1, 2, 3};
    const hsize_t size = 3, limit = H5S_UNLIMITED, chunk = 2;
    const hid_t file = H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT),
                space = H5Screate_simple(1, &size, &limit), properties = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_chunk(properties, 1, &chunk);
    const hid_t dataset = H5Dcreate2(file, "v", H5T_NATIVE_INT32, space, H5P_DEFAULT, properties, H5P_DEFAULT);
    ASSERT_GE(H5Dwrite(dataset, H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, values), 0);
    H5Dclose(dataset), H5Pclose(properties), H5Sclose(space), H5Fclose(file);
    const auto superblock_version = [](const std::string& name) { return read_file(name).at(8); };
    EXPECT_EQ(superblock_version(path), 0);
    EXPECT_THAT(File::open(path).read<std::int32_t>("v"), ElementsAre(1, 2, 3));
    {
        File appended = File::open_append(path);
        appended.append("v", values, 2);
        appended.close();
    }
    EXPECT_THAT(File::open(path).read<std::int32_t>("v"), ElementsAre(1, 2, 3, 1, 2));
    File::create(folder / "new.h5").close();
    EXPECT_EQ(superblock_version(folder / "new.h5"), 3);
}

// A full disk is an error of the write, the flush or the close, and never a crash afterwards.
TEST(Hdf5, FullDiskIsReported) {
    test::TemporaryFolder folder;
    const std::vector<double> values(100000, 1.0);
    for (const rlim_t limit : {0, 100, 2000, 4096, 100000, 400000}) {
        const std::string path = folder / "a.h5";
        const std::string message = error_of([&] {
            const test::FileSizeLimit full(limit);
            File file = File::create(path);
            file.create_appendable<double>("small", 10, 0);
            file.append("small", values.data(), 10);
            file.set_attribute("/", "complete", std::int64_t{1});
            file.write("values", values.data(), {100000});
            file.flush();
            file.close();
        });
        EXPECT_THAT(message, HasSubstr("File too large")) << "limit " << limit;
    }
    // What fits in one dataset's buffers until the close.
    const std::string message = error_of([&] {
        File file = File::create(folder / "b.h5");
        const test::FileSizeLimit full(10);
        file.create_appendable<double>("small", 10, 0);
        file.append("small", values.data(), 10);
        file.close();
    });
    EXPECT_THAT(message, HasSubstr("File too large"));
    // The library still works.
    File file = File::create(folder / "c.h5");
    file.write("values", values.data(), {100000});
    file.close();
    EXPECT_EQ(File::open(folder / "c.h5").read<double>("values"), values);
}

TEST(Hdf5, SameContentsSameBytes) {
    test::TemporaryFolder folder;
    const std::int32_t values[] = {1, 2, 3};
    for (const char* name : {"a.h5", "b.h5"}) {
        File file = File::create(folder / name);
        file.write("v/w", values, {3});
        file.create_appendable<std::int32_t>("g", 2, 1);
        file.append("g", values, 3);
        file.set_attribute("/", "n", std::int64_t{3});
        file.close();
        if (name[0] == 'a') std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // times in the file count seconds
    }
    std::ifstream a(folder / "a.h5"), b(folder / "b.h5");
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(a), {}), std::string(std::istreambuf_iterator<char>(b), {}));
}

TEST(Hdf5, SeveralThreadsReadOneFile) {
    test::TemporaryFolder folder;
    std::vector<std::int64_t> values(10000);
    std::iota(values.begin(), values.end(), 0);
    File file = File::create(folder / "a.h5");
    file.write("v", values.data(), {10000});
    std::vector<std::thread> threads;
    std::vector<std::int64_t> sums(4);
    for (std::size_t t = 0; t < 4; ++t)
        threads.emplace_back([&, t] {
            for (std::int64_t i = 0; i < 10000; i += 100) {
                std::int64_t part[100];
                file.read_slice("v", i, 100, part);
                sums[t] += std::accumulate(part, part + 100, std::int64_t{0});
            }
        });
    for (auto& thread : threads) thread.join();
    EXPECT_THAT(sums, testing::Each(10000 * 9999 / 2));
}

// Elements found past the library are those that it reads, where the file holds them as they are in memory.
TEST(Hdf5, PositionsOfChunks) {
    test::TemporaryFolder folder;
    std::vector<std::uint16_t> values(1000);
    std::iota(values.begin(), values.end(), std::uint16_t{7});
    {
        File file = File::create(folder / "a.h5");
        for (const auto& [name, deflate] : {std::pair{"plain", 0}, std::pair{"deflated", 1}}) {
            file.create_appendable<std::uint16_t>(name, 64, deflate);
            file.append(name, values.data(), 1000);
        }
        file.write("contiguous", values.data(), {1000});
        file.close();
    }
    const File file = File::open(folder / "a.h5");
    for (std::int64_t first = 0; first < 1000; first += 64) {
        const std::int64_t position = file.position_of_chunk<std::uint16_t>("plain", first);
        const auto count = static_cast<std::size_t>(std::min<std::int64_t>(64, 1000 - first));
        ASSERT_GT(position, 0);
        std::vector<std::uint16_t> found(count);
        ASSERT_EQ(pread(file.descriptor(), found.data(), 2 * count, position), static_cast<ssize_t>(2 * count));
        EXPECT_TRUE(std::equal(found.begin(), found.end(), values.begin() + first));
        EXPECT_EQ(file.position_of_chunk<std::uint32_t>("plain", first), -1);
        EXPECT_EQ(file.position_of_chunk<std::uint16_t>("deflated", first), -1);
        EXPECT_EQ(file.position_of_chunk<std::uint16_t>("contiguous", first), -1);
    }
    EXPECT_EQ(file.position_of_chunk<std::uint16_t>("plain", 4096), -1);
}

}  // namespace
}  // namespace fenwick
