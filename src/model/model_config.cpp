#include "model/model_config.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace fenwick::model {
namespace {

constexpr std::array<std::string_view, 5> type_names{"transformer", "mamba2", "log_linear_mamba2", "gated_deltanet",
                                                     "log_linear_gated_deltanet"};

void check_positive(std::string_view name, std::int64_t value, std::string_view example) {
    FENWICK_CHECK(value >= 1, "model.{} is {}; a whole number of at least 1 is needed, for example {}", name, value, example);
}

// The legal neighbours of `value` among the multiples of `divisor`: "96 or 112".
std::string multiples_around(std::int64_t value, std::int64_t divisor) {
    const std::int64_t below = value / divisor * divisor;
    return below == 0 ? fmt::format("{}", divisor) : fmt::format("{} or {}", below, below + divisor);
}

// The largest divisor of `value` that is not above `wish`.
std::int64_t divisor_near(std::int64_t value, std::int64_t wish) {
    for (std::int64_t divisor = std::clamp<std::int64_t>(wish, 1, value); divisor > 1; --divisor)
        if (value % divisor == 0) return divisor;
    return 1;
}

}  // namespace

std::string_view name_of(ModelType type) { return type_names[static_cast<std::size_t>(type)]; }

ModelType model_type_from(std::string_view name) {
    for (std::size_t i = 0; i < type_names.size(); ++i)
        if (type_names[i] == name) return static_cast<ModelType>(i);
    fail("model.type is '{}'; use one of {}", name, fmt::join(type_names, ", "));
}

std::int64_t ModelConfig::mlp_width() const {
    if (intermediate_size > 0) return intermediate_size;
    return 256 * ((8 * hidden_size + 767) / 768);
}

std::int64_t ModelConfig::kv_heads() const { return num_kv_heads > 0 ? num_kv_heads : num_heads; }

std::int64_t ModelConfig::key_width() const {
    if (is_mamba2(type)) return state_size;
    return head_dim > 0 || type != ModelType::transformer ? head_dim : hidden_size / std::max<std::int64_t>(num_heads, 1);
}

std::int64_t ModelConfig::value_width() const {
    if (is_gated_deltanet(type)) return std::llround(expand_v * static_cast<double>(head_dim));
    return is_mamba2(type) ? head_dim : key_width();
}

void ModelConfig::validate() const {
    // Products of two such sizes stay far from the end of 64 bits.
    for (const auto& [name, value] : {std::pair<std::string_view, std::int64_t>{"vocab_size", vocab_size},
                                      {"hidden_size", hidden_size},
                                      {"num_layers", num_layers},
                                      {"intermediate_size", intermediate_size},
                                      {"num_heads", num_heads},
                                      {"head_dim", head_dim},
                                      {"state_size", state_size}})
        FENWICK_CHECK(value <= 1 << 24, "model.{} is {}; at most {} is supported", name, value, 1 << 24);
    check_positive("vocab_size", vocab_size, "32000");
    check_positive("hidden_size", hidden_size, "1536");
    check_positive("num_layers", num_layers, "21");
    check_positive("num_heads", num_heads, is_mamba2(type) ? "48" : "16");
    FENWICK_CHECK(intermediate_size >= 0, "model.intermediate_size is {}; use 0 for {}, or a positive width", intermediate_size,
                  256 * ((8 * hidden_size + 767) / 768));
    FENWICK_CHECK(std::isfinite(norm_eps) && norm_eps > 0, "model.norm_eps is {}; it must be above 0, for example 1e-5", norm_eps);
    FENWICK_CHECK(std::isfinite(initializer_range) && initializer_range > 0,
                  "model.initializer_range is {}; it must be above 0, for example 0.02", initializer_range);
    FENWICK_CHECK(head_dim >= 0, "model.head_dim is {}; it must not be negative, for example 64", head_dim);

    if (type == ModelType::transformer) {
        FENWICK_CHECK(head_dim > 0 || hidden_size % num_heads == 0,
                      "model.hidden_size {} is not divisible by model.num_heads {} (head_dim would be {}); use {}, or set "
                      "model.head_dim",
                      hidden_size, num_heads, static_cast<double>(hidden_size) / static_cast<double>(num_heads),
                      multiples_around(hidden_size, num_heads));
        FENWICK_CHECK(key_width() % 2 == 0,
                      "model.head_dim is {}; rotary positions turn pairs, so it must be even: use {} (or another "
                      "model.num_heads)",
                      key_width(), key_width() + 1);
        FENWICK_CHECK(num_kv_heads >= 0 && num_heads % kv_heads() == 0,
                      "model.num_heads {} is not divisible by model.num_kv_heads {}; use {}", num_heads, num_kv_heads,
                      divisor_near(num_heads, num_kv_heads));
        FENWICK_CHECK(std::isfinite(rope_theta) && rope_theta > 0, "model.rope_theta is {}; it must be above 0, for example 10000",
                      rope_theta);
        return;
    }
    check_positive("head_dim", head_dim, is_mamba2(type) ? "64" : "128");
    FENWICK_CHECK(conv_width >= 1 && conv_width <= 16, "model.conv_width is {}; from 1 to 16 is supported, usually 4", conv_width);
    FENWICK_CHECK(chunk_size >= 16 && chunk_size <= 256 && std::has_single_bit(static_cast<std::uint64_t>(chunk_size)),
                  "model.chunk_size is {}; use 16, 32, 64, 128 or 256", chunk_size);
    if (is_mamba2(type)) {
        check_positive("state_size", state_size, "128");
        FENWICK_CHECK(n_groups >= 1 && num_heads % n_groups == 0, "model.num_heads {} is not divisible by model.n_groups {}; use {}",
                      num_heads, n_groups, divisor_near(num_heads, n_groups));
    } else {
        const double width = expand_v * static_cast<double>(head_dim);
        FENWICK_CHECK(std::isfinite(expand_v) && width >= 1 && width <= 1 << 24 && width == std::floor(width),
                      "model.expand_v {} times model.head_dim {} is {}, not a whole positive width of values; use expand_v {}",
                      expand_v, head_dim, width,
                      std::isfinite(width) && width >= 1 ? std::floor(std::min(width, 4.0 * static_cast<double>(head_dim))) /
                                                               static_cast<double>(head_dim)
                                                         : 2.0);
    }
    if (has_levels(type))
        FENWICK_CHECK(num_levels >= 1 && num_levels <= 64,
                      "model.num_levels is {}; {} needs from 1 to 64: bit_width(T - 1) + 1 for sequences of T tokens, 15 for "
                      "16384",
                      num_levels, name_of(type));
}

}  // namespace fenwick::model
