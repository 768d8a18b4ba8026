// The decoder against the parallel forward: on the CPU, and on a GPU where there is one, with and without a graph.
#include "model/decoder.h"

#include <bit>
#include <cmath>

#include "base/memory_cuda.h"
#include "small_models.h"
#include "support/sampling.h"
#include "support/temporary_folder.h"

namespace fenwick::model {
namespace {

using test::columns_of;
using test::random_ids;
using test::small_config;

constexpr Device gpu{DeviceType::cuda, 0};

class DecoderTest : public testing::TestWithParam<ModelType> {};
INSTANTIATE_TEST_SUITE_P(Types, DecoderTest, testing::ValuesIn(test::all_types), test::type_name);
class CudaDecoder : public testing::TestWithParam<ModelType> {
protected:
    void SetUp() override {
        if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
    }
};
INSTANTIATE_TEST_SUITE_P(Types, CudaDecoder, testing::ValuesIn(test::all_types), test::type_name);

LanguageModel small_model(const ModelConfig& config, Device device) {
    LanguageModel model(config, device, DType::float32, DType::float32);
    model.initialize(1);
    test::perturb(model, 0.05);
    return model;
}

// Every matrix as bfloat16 has it; the embedding is read as it is.
void round_matrices(const LanguageModel& model) {
    for (const auto& parameter : model.parameters()) {
        Tensor value = parameter.variable.value();
        if (parameter.name.find("_proj.weight") == std::string::npos && parameter.name != "lm_head.weight") continue;
        auto values = value.to_vector<float>();
        for (float& x : values) {
            const auto bits = std::bit_cast<std::uint32_t>(x);
            x = std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
        }
        value.copy_from(Tensor::from(values, value.shape()));
    }
}

// Sizes that no kernel's tiles divide, and fewer levels than the tokens need.
ModelConfig odd_config(ModelType type) {
    ModelConfig config = small_config(type);
    config.tie_embeddings = true;
    config.vocab_size = 37;
    config.hidden_size = 30;
    config.intermediate_size = 23;
    config.num_levels = 4;  // enough for 8 tokens
    config.conv_width = 2;
    config.num_heads = 3;
    config.num_kv_heads = 1;
    config.n_groups = 1;
    config.head_dim = 10;
    config.state_size = 9;
    config.expand_v = 1.5;
    return config;
}

std::vector<double> whole_logits(const LanguageModel& model, const Tensor& ids) {
    return model.logits(ids.to(model.device()), SequenceLayout::uniform(ids.size(0), ids.size(1)))
        .value()
        .to_vector<double>();
}

// The logits [T - first, B, vocab] of tokens first .. T - 1, fed to a decoder behind `first` tokens of step().
std::vector<float> decoded(const LanguageModel& model, const Tensor& ids, std::int64_t first,
                           const DecoderOptions& options) {
    const auto state = model.new_state(ids.size(0));
    if (first > 0) model.step(columns_of(ids, 0, first).to(model.device()), *state);
    Decoder decoder(model, *state, options);
    std::vector<float> all;
    for (std::int64_t t = first; t < ids.size(1); ++t) {
        decoder.feed(columns_of(ids, t, t + 1).to_vector<std::int32_t>());
        decoder.advance();
        const auto logits = decoder.logits().to_vector<float>();
        all.insert(all.end(), logits.begin(), logits.end());
    }
    EXPECT_EQ(decoder.position(), ids.size(1));
    return all;
}

// Largest difference of decoded(..., first, ...) from logits [B, T, vocab].
double difference(const std::vector<float>& decoded, const std::vector<double>& whole, const Tensor& ids,
                  std::int64_t first) {
    const std::int64_t batch = ids.size(0), length = ids.size(1),
                       vocab = static_cast<std::int64_t>(whole.size()) / (batch * length);
    if (static_cast<std::int64_t>(decoded.size()) != (length - first) * batch * vocab) return INFINITY;
    double largest = 0;
    std::size_t i = 0;
    for (std::int64_t t = first; t < length; ++t)
        for (std::int64_t b = 0; b < batch; ++b)
            for (std::int64_t id = 0; id < vocab; ++id) {
                const double off = std::abs(decoded[i++] - whole[static_cast<std::size_t>((b * length + t) * vocab + id)]);
                if (!(off <= largest)) largest = off;
            }
    return largest;
}

// Even and odd positions, on both sides of powers of two.
constexpr std::int64_t starts[] = {0, 1, 2, 7, 8, 12, 31, 33, 64, 127};

TEST_P(DecoderTest, EqualsTheParallelForward) {
    const LanguageModel model = small_model(small_config(GetParam()), cpu_device);
    const Tensor ids = random_ids(2, 140, 61, 1);
    const auto whole = whole_logits(model, ids);
    for (const auto first : starts) EXPECT_LT(difference(decoded(model, ids, first, {}), whole, ids, first), 1e-5) << first;
}

TEST_P(DecoderTest, MakesRoomAsItGoes) {
    const LanguageModel model = small_model(small_config(GetParam()), cpu_device);
    const Tensor ids = random_ids(1, 70, 61, 2);
    EXPECT_EQ(decoded(model, ids, 3, {.reserve = 1}), decoded(model, ids, 3, {.reserve = 1000}));
}

TEST_P(DecoderTest, OtherShapes) {
    const ModelConfig config = odd_config(GetParam());
    const LanguageModel model = small_model(config, cpu_device);
    const Tensor ids = random_ids(3, 40, 37, 3);
    EXPECT_LT(difference(decoded(model, ids, 5, {}), whole_logits(model, ids), ids, 5), 1e-5);
}

TEST_P(DecoderTest, RefusesWhatItCannotDo) {
    const LanguageModel model = small_model(small_config(GetParam()), cpu_device);
    const auto state = model.new_state(2);
    EXPECT_EQ(test::error_of([&] { Decoder(model, *state, {.weights = DType::bfloat16}); }),
              "[decoder] weights in bfloat16 are not available on cpu; use float32");
    EXPECT_EQ(test::error_of([&] { Decoder(model, *state, {.temperature = -1}); }),
              "[sample] temperature is -1; 0 or more is needed");
    EXPECT_EQ(test::error_of([&] { Decoder(model, *state, {.top_p = 0}); }),
              "[sample] top_p is 0; it must be above 0 and at most 1");
    Decoder decoder(model, *state, {});
    EXPECT_EQ(test::error_of([&] { decoder.feed({1}); }), "[decoder] 1 ids for 2 rows");
    EXPECT_EQ(test::error_of([&] { decoder.feed({1, 61}); }), "[decoder] token id 61 is outside the vocabulary of 61");
    EXPECT_EQ(test::error_of([&] { decoder.drawn(0); }), "[decoder] draw 0 of 0; the last 16 can be asked for");
    LanguageModel doubles(small_config(GetParam()), cpu_device, DType::float64, DType::float64);
    EXPECT_EQ(test::error_of([&] { Decoder(doubles, *doubles.new_state(1), {}); }),
              "[decoder] the model is float64; a float32 model is needed");
}

TEST_P(DecoderTest, NumbersThatAreNotFiniteAreAnError) {
    const LanguageModel model = small_model(small_config(GetParam()), cpu_device);
    Tensor norm = model.parameters().back().variable.value();  // the head
    norm.fill(NAN);
    Decoder decoder(model, *model.new_state(1), {});
    decoder.feed({1});
    decoder.advance();
    decoder.advance();  // the next token is fed 0
    EXPECT_EQ(test::error_of([&] { decoder.drawn(0); }), "[sample] the logits are not finite");
}

// ---- on a GPU ------------------------------------------------------------------------------------------------------------

TEST_P(CudaDecoder, EqualsTheParallelForward) {
    const LanguageModel host = small_model(small_config(GetParam()), cpu_device),
                        model = small_model(small_config(GetParam()), gpu);
    const Tensor ids = random_ids(2, 140, 61, 1);
    const auto whole = whole_logits(host, ids);
    for (const auto first : starts) {
        const auto logits = decoded(model, ids, first, {});
        EXPECT_LT(difference(logits, whole, ids, first), 2e-5) << first;
        EXPECT_EQ(logits, decoded(model, ids, first, {.graph = false, .reserve = 1})) << first;
        EXPECT_EQ(logits, decoded(model, ids, first, {})) << "not repeatable";
    }
}

// Widths of the vectorized kernels, in float32 and bfloat16; more rows than one launch takes.
TEST_P(CudaDecoder, WideModelsInBothTypes) {
    ModelConfig config = small_config(GetParam());
    config.vocab_size = 257;
    config.hidden_size = 256;
    config.intermediate_size = 768;
    config.num_heads = is_gated_deltanet(GetParam()) ? 2 : 4;
    config.head_dim = is_gated_deltanet(GetParam()) ? 192 : 96;
    config.num_kv_heads = 2;
    config.state_size = 128;
    config.num_layers = 1;
    for (const std::int64_t batch : {1, 3, 11}) {
        const LanguageModel host = small_model(config, cpu_device), model = small_model(config, gpu);
        round_matrices(host);
        round_matrices(model);
        const Tensor ids = random_ids(batch, 70, 257, 4);
        const auto whole = whole_logits(host, ids);
        const double largest = std::abs(
            *std::max_element(whole.begin(), whole.end(), [](double a, double b) { return std::abs(a) < std::abs(b); }));
        const auto in_float32 = decoded(model, ids, 29, {}),
                   in_bfloat16 = decoded(model, ids, 29, {.weights = DType::bfloat16});
        EXPECT_LT(difference(in_float32, whole, ids, 29), 2e-5 * largest) << batch;
        // The weights lose nothing; the Transformer's cache does.
        EXPECT_LT(difference(in_bfloat16, whole, ids, 29), (GetParam() == ModelType::transformer ? 1e-2 : 2e-5) * largest)
            << batch;
        EXPECT_EQ(in_bfloat16, decoded(model, ids, 29, {.weights = DType::bfloat16, .graph = false})) << batch;
    }
}

// A token as one launch: units that the blocks do not divide, a product of more rows than one step takes, several norm
// groups, enough tokens for every kind of merge.
TEST_P(CudaDecoder, OneLaunch) {
    if (GetParam() == ModelType::transformer) GTEST_SKIP() << "the Transformer has none";
    for (const bool wide : {false, true}) {
        ModelConfig config = small_config(GetParam());
        config.vocab_size = 257;
        config.hidden_size = wide ? 384 : 256;
        config.intermediate_size = wide ? 2304 : 768;
        config.num_heads = is_gated_deltanet(GetParam()) ? 2 : wide ? 32 : 8;
        config.head_dim = is_gated_deltanet(GetParam()) ? 192 : wide ? 128 : 64;
        config.expand_v = 2;
        config.n_groups = wide ? 2 : 1;
        config.state_size = wide ? 64 : 128;
        config.num_levels = wide ? 4 : 10;
        config.level_overflow = ops::LevelOverflow::clamp;
        config.num_layers = 3;
        const LanguageModel host = small_model(config, cpu_device), model = small_model(config, gpu);
        round_matrices(host);
        round_matrices(model);
        if (Decoder(model, *model.new_state(1), {.weights = DType::bfloat16}).launches() != 2)
            GTEST_SKIP() << "needs Hopper";
        const Tensor ids = random_ids(1, 140, 257, 4);
        const auto whole = whole_logits(host, ids);
        const double largest = std::abs(
            *std::max_element(whole.begin(), whole.end(), [](double a, double b) { return std::abs(a) < std::abs(b); }));
        for (const auto first : starts) {
            if (!test::sampled()) continue;
            const auto logits = decoded(model, ids, first, {.weights = DType::bfloat16});
            EXPECT_LT(difference(logits, whole, ids, first), 5e-5 * largest) << wide << " " << first;
            EXPECT_EQ(logits, decoded(model, ids, first, {.weights = DType::bfloat16, .graph = false, .reserve = 1}))
                << wide << " " << first;
        }
        EXPECT_LT(difference(decoded(model, ids, 29, {.weights = DType::bfloat16, .one_launch = false}), whole, ids, 29),
                  2e-5 * largest);
    }
}

TEST_P(CudaDecoder, OtherShapes) {
    const ModelConfig config = odd_config(GetParam());
    const LanguageModel host = small_model(config, cpu_device), model = small_model(config, gpu);
    const Tensor ids = random_ids(3, 40, 37, 3);
    EXPECT_LT(difference(decoded(model, ids, 5, {}), whole_logits(host, ids), ids, 5), 2e-5);
}

// Far behind any boundary that the other tests reach: the same random state on both devices.
TEST_P(CudaDecoder, LongHistories) {
    ModelConfig config = small_config(GetParam());
    config.num_levels = 15;
    const LanguageModel host = small_model(config, cpu_device), model = small_model(config, gpu);
    const Tensor ids = random_ids(2, 12, 61, 6);
    for (const std::int64_t tokens : {1020, 4095, 8187}) {
        Decoder on_cpu(host, *host.random_state(2, tokens, 1), {}), on_gpu(model, *model.random_state(2, tokens, 1), {});
        for (std::int64_t t = 0; t < ids.size(1); ++t) {
            for (Decoder* decoder : {&on_cpu, &on_gpu}) {
                decoder->feed(columns_of(ids, t, t + 1).to_vector<std::int32_t>());
                decoder->advance();
            }
            const auto expected = on_cpu.logits().to_vector<double>(), found = on_gpu.logits().to_vector<double>();
            for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(found[i], expected[i], 2e-5) << tokens << " " << t;
        }
    }
}

TEST_P(CudaDecoder, DrawsWhatTheCpuDraws) {
    const LanguageModel host = small_model(small_config(GetParam()), cpu_device),
                        model = small_model(small_config(GetParam()), gpu);
    for (DecoderOptions options : {DecoderOptions{.temperature = 0},
                                   {.temperature = 1.3},
                                   {.top_k = 5},
                                   {.top_p = 0.7},
                                   {.vocabulary = 50, .temperature = 0.8, .top_k = 20, .top_p = 0.9}}) {
        options.seed = 7;
        Decoder on_cpu(host, *host.new_state(2), options), on_gpu(model, *model.new_state(2), options);
        for (Decoder* decoder : {&on_cpu, &on_gpu}) decoder->feed({3, 4});
        for (std::int64_t n = 0; n < 40; ++n) {
            on_cpu.advance();
            on_gpu.advance();
            ASSERT_EQ(on_gpu.drawn(n), on_cpu.drawn(n)) << n;
        }
    }
}

}  // namespace
}  // namespace fenwick::model
