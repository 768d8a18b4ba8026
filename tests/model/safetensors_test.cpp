#include "model/safetensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>

#include "base/files.h"
#include "base/random.h"
#include "support/temporary_folder.h"

namespace fenwick::model::safetensors {
namespace {

using test::TemporaryFolder;

std::string message_of(std::string_view header, std::uint64_t data_bytes) {
    try {
        parse_header(header, data_bytes, "m");
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

TEST(Safetensors, ReadsAHeader) {
    const auto entries = parse_header(
        R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
        R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"e":{"dtype":"F16","shape":[0],"data_offsets":[16,16]}})", 16, "m");
    ASSERT_EQ(entries.size(), 3u);
    EXPECT_EQ(entries[0].name, "a");
    EXPECT_EQ(entries[0].shape, Shape{});
    EXPECT_EQ(entries[1].name, "b");
    EXPECT_EQ(entries[1].type, Type::bfloat16);
    EXPECT_EQ(entries[1].shape, (Shape{2, 3}));
    EXPECT_EQ(entries[2].name, "e");
}

TEST(Safetensors, RefusesDamagedHeadersByName) {
    const auto one = [](std::string_view body) { return R"({"w":{)" + std::string(body) + "}}"; };
    const std::pair<std::string, std::string> cases[] = {
        {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), "m: tensor 'w' has 4 bytes, its shape [2] of F32 needs 8"},
        {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,16])"),
         "m: tensor 'w' ends at byte 16 of the values, but only 8 follow the header (truncated?)"},
        {one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), "m: tensor 'w' ends at 0, before it begins at 8"},
        {one(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"),
         "m: tensor 'w': a size in its shape is -2; a whole number of at least 0 is needed"},
        {one(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"),
         "m: tensor 'w': a size in its shape is 2.0; a whole number of at least 0 is needed"},
        {one(R"("dtype":"F32","shape":[2],"data_offsets":[-8,8])"),
         "m: tensor 'w': data_offsets is -8; a whole number of at least 0 is needed"},
        {one(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8])"),
         "m: tensor 'w' with a size of 18446744073709551615 in its shape does not fit into the 8 bytes of values"},
        {one(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8])"),
         "m: tensor 'w' with a size of 4294967296 in its shape does not fit into the 8 bytes of values"},
        {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615])"), ""},
        {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,1e400])"), ""},
        {one(R"("dtype":"I64","shape":[1],"data_offsets":[0,8])"), "m: tensor 'w' has dtype I64; F32, BF16 and F16 can be read"},
        {one(R"("dtype":7,"shape":[1],"data_offsets":[0,8])"), "m: tensor 'w' has dtype 7; F32, BF16 and F16 can be read"},
        {one(R"("shape":[2],"data_offsets":[0,8])"), "m: tensor 'w' must have exactly dtype, shape and data_offsets"},
        {one(R"("dtype":"F32","shape":2,"data_offsets":[0,8])"), "m: tensor 'w': shape must be a list of at most 8 sizes"},
        {one(R"("dtype":"F32","shape":[2],"data_offsets":[8])"), "m: tensor 'w': data_offsets must be two numbers"},
        {one(R"("dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8])"), "m: the header names 'dtype' twice"},
        {R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
         "m: the header names 'w' twice"},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
         "m: tensor 'w' begins at byte 4, inside 'a', which ends at 8"},
        {R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "m: bytes 0 to 4 before tensor 'w' belong to none"},
        {R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "m: 8 bytes of values, but the tensors take 4"},
        {R"({"w":[]})", "m: tensor 'w' must have exactly dtype, shape and data_offsets"},
        {R"({"":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
         "m: tensor name '' is empty, longer than 1024 bytes or has control characters"},
        {"{\"a\\nb\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
         "m: tensor name 'a?b' is empty, longer than 1024 bytes or has control characters"},
        {R"([1])", "m: the header must be a JSON object"},
        {R"({"w":)", ""},
        {"", ""},
        {std::string(100000, '['), ""},
    };
    for (const auto& [header, expected] : cases) {
        const std::string message = message_of(header, 8);
        EXPECT_NE(message, "") << header.substr(0, 100);
        EXPECT_EQ(message.find('\n'), std::string::npos);
        EXPECT_LT(message.size(), 400u);
        if (!expected.empty()) {
            EXPECT_EQ(message, expected);
        }
    }
}

TEST(Safetensors, RefusesDamagedFiles) {
    const TemporaryFolder folder;
    const std::string path = folder.path() + "/m.safetensors";
    write(path, {{"w", Tensor::full({3, 5}, 2.0, DType::float32)}}, Type::float32);
    const std::string whole = read_file(path);
    EXPECT_EQ(whole.size() % 4, 0u);
    const auto refused = [&](std::string bytes) {
        std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
        try {
            File::open(path);
        } catch (const Error& error) {
            return std::string(error.what()).starts_with(path + ": ");
        }
        return false;
    };
    for (std::size_t size = 0; size < whole.size(); ++size) ASSERT_TRUE(refused(whole.substr(0, size))) << size;
    EXPECT_TRUE(refused(whole + "x"));
    for (const std::uint64_t length : {std::uint64_t{0}, std::uint64_t{100'000'001}, ~std::uint64_t{0}, std::uint64_t{1} << 63}) {
        std::string changed = whole;
        std::memcpy(changed.data(), &length, 8);
        EXPECT_TRUE(refused(changed)) << length;
    }
    EXPECT_FALSE(refused(whole));
    EXPECT_THROW(File::open(folder.path() + "/none.safetensors"), Error);
    EXPECT_THROW(File::open(folder.path()), Error);
}

TEST(Safetensors, RandomDamageIsRefusedOrReadable) {
    const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F16","shape":[2,2],"data_offsets":[8,16]}})";
    Random random(1);
    for (int i = 0; i < 20000; ++i) {
        std::string header = good;
        for (std::uint64_t edits = 1 + random.below(4); edits > 0; --edits) {
            const auto at = static_cast<std::size_t>(random.below(header.size()));
            switch (random.below(3)) {
                case 0: header[at] = static_cast<char>(random.below(256)); break;
                case 1: header.erase(at, 1); break;
                default: header.insert(at, 1, "0123456789{}[],\"-"[random.below(17)]);
            }
        }
        try {
            std::uint64_t covered = 0;
            for (const auto& entry : parse_header(header, 16, "m")) {
                EXPECT_EQ(entry.begin, covered);
                EXPECT_EQ(entry.end - entry.begin, static_cast<std::uint64_t>(count_of(entry.shape) * size_of(entry.type)));
                covered = entry.end;
            }
            EXPECT_EQ(covered, 16u);
        } catch (const Error&) {  // nothing else may escape
        }
    }
}

TEST(Safetensors, RoundTrips) {
    const TemporaryFolder folder;
    const std::string path = folder.path() + "/m.safetensors";
    Random random(3);
    std::vector<float> values(1500);
    for (auto& x : values) x = static_cast<float>(random.normal());
    const Tensor a = Tensor::from(values, {30, 50}), b = Tensor::from(std::vector<float>{1.5f}, {1});
    for (const Type type : {Type::float32, Type::bfloat16, Type::float16}) {
        write(path, {{"a.weight", a}, {"b", b}}, type);
        const File file = File::open(path);
        ASSERT_EQ(file.entries().size(), 2u);
        EXPECT_EQ(file.entries()[0].name, "a.weight");
        EXPECT_EQ(file.entries()[0].type, type);
        EXPECT_EQ(file.entries()[0].shape, (Shape{30, 50}));
        const auto back = file.read(file.entries()[0]).to_vector<float>();
        for (std::size_t i = 0; i < values.size(); ++i) {
            const float expected = type == Type::float32    ? values[i]
                                   : type == Type::bfloat16 ? from_bfloat16(to_bfloat16(values[i]))
                                                            : from_float16(to_float16(values[i]));
            ASSERT_EQ(back[i], expected);
        }
    }
    EXPECT_THROW(write(path, {{"w", Tensor::full({2}, 70000.0, DType::float32)}}, Type::float16), Error);
    EXPECT_FALSE(std::ifstream(path + ".tmp").good());
    EXPECT_EQ(File::open(path).entries().size(), 2u);  // what stood there still stands
    EXPECT_THROW(write(path, {{"w", a}, {"w", b}}, Type::float32), Error);
}

TEST(Safetensors, HalfPrecisionValues) {
    // Every float16 and bfloat16 survives the way through float32.
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
        const auto half = static_cast<std::uint16_t>(bits);
        const float wide = from_float16(half), brain = from_bfloat16(half);
        ASSERT_TRUE(std::isnan(wide) || to_float16(wide) == half) << bits;
        ASSERT_TRUE(std::isnan(brain) || to_bfloat16(brain) == half) << bits;
        ASSERT_EQ(std::isnan(wide), std::isnan(from_float16(to_float16(wide))));
        ASSERT_EQ(std::isnan(brain), std::isnan(from_bfloat16(to_bfloat16(brain))));
    }
    EXPECT_EQ(from_float16(0x3c00), 1.0f);
    EXPECT_EQ(from_float16(0x7bff), 65504.0f);
    EXPECT_EQ(from_float16(0x0001), 0x1.0p-24f);
    EXPECT_EQ(from_float16(0xc000), -2.0f);
    EXPECT_EQ(to_float16(65519.0f), 0x7bff);  // round to nearest, ties to even
    EXPECT_EQ(to_float16(65520.0f), 0x7c00);
    EXPECT_EQ(to_float16(1.0f + 0x1.0p-11f), 0x3c00);
    EXPECT_EQ(to_float16(1.0f + 0x1.8p-10f), 0x3c02);
    EXPECT_EQ(to_float16(0x1.0p-25f), 0);
    EXPECT_EQ(to_float16(0x1.8p-25f), 1);
    EXPECT_EQ(to_bfloat16(1.0f + 0x1.0p-8f), 0x3f80);
    EXPECT_EQ(to_bfloat16(1.0f + 0x1.8p-7f), 0x3f82);
}

}  // namespace
}  // namespace fenwick::model::safetensors
