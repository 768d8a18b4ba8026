#include "train/config.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <type_traits>
#include <variant>

#include "base/files.h"

namespace fenwick::train {
namespace {

// ---- the table -------------------------------------------------------------------------------------------------------

// A key's value as the table sees it. Enumerations appear as their names.
using Value = std::variant<std::int64_t, double, bool, std::string, std::vector<data::WeightedCorpus>>;

constexpr double any = std::numeric_limits<double>::infinity();

struct Key {
    std::string name;
    std::string type;  // "whole number": how docs and errors call it
    bool required = false;
    double low = -any, high = any;     // allowed range of a number
    bool low_open = false, high_open = false;
    std::vector<std::string> choices;  // of an enumeration
    std::string doc;
    std::function<Value(const RunConfig&)> get;
    std::function<void(RunConfig&, const Value&)> set;
};

struct Section {
    std::string name;  // "": top level
    std::string doc;
    std::vector<Key> keys;
};

template <class T>
std::string type_name() {
    if constexpr (std::is_same_v<T, std::int64_t>) return "whole number";
    if constexpr (std::is_same_v<T, double>) return "number";
    if constexpr (std::is_same_v<T, bool>) return "true or false";
    if constexpr (std::is_same_v<T, std::string>) return "text";
    if constexpr (std::is_same_v<T, std::vector<data::WeightedCorpus>>) return "corpora";
    return "?";
}

// A plain field: `field` maps a RunConfig (const or not) to the member.
template <class Field>
Key key(std::string name, Field field, std::string doc) {
    using T = std::remove_cvref_t<decltype(field(std::declval<RunConfig&>()))>;
    Key key;
    key.name = std::move(name);
    key.type = type_name<T>();
    key.doc = std::move(doc);
    key.get = [field](const RunConfig& config) { return Value(field(config)); };
    key.set = [field](RunConfig& config, const Value& value) { field(config) = std::get<T>(value); };
    return key;
}

// An enumeration: names and values side by side.
template <class Field, class E>
Key choice(std::string name, Field field, std::vector<std::pair<std::string, E>> names, std::string doc) {
    Key key;
    key.name = std::move(name);
    key.type = "choice";
    key.doc = std::move(doc);
    for (const auto& [text, value] : names) key.choices.push_back(text);
    key.get = [field, names](const RunConfig& config) {
        for (const auto& [text, value] : names)
            if (value == field(config)) return Value(text);
        return Value(std::string("?"));
    };
    key.set = [field, names](RunConfig& config, const Value& chosen) {
        for (const auto& [text, value] : names)
            if (text == std::get<std::string>(chosen)) field(config) = value;
    };
    return key;
}

Key required(Key key) {
    key.required = true;
    return key;
}
Key at_least(double low, Key key) {
    key.low = low;
    return key;
}
Key above(double low, Key key) {
    key.low = low;
    key.low_open = true;
    return key;
}
Key between(double low, double high, Key key) {
    key.low = low;
    key.high = high;
    return key;
}
Key below(double high, Key key) {
    key.high = high;
    key.high_open = true;
    return key;
}

// The largest of each kind. The bytes of all parameters and their moments, and sums and products of two of the others, stay
// within 64 bits.
constexpr double max_count = 4096;  // heads, layers, width of one head
constexpr double max_width = 1 << 20, max_vocabulary = 1 << 24;
constexpr std::int64_t max_batch_tokens = std::int64_t{1} << 31;  // one step's
constexpr double max_steps = 1e12, max_tokens = 1e15;

#define FIELD(path) [](auto& config) -> auto& { return config.path; }

const std::vector<Section>& table() {
    using data::Packing;
    using model::ModelType;
    using model::Recompute;
    static const std::vector<Section> sections = {
        {"", "Top level", {
            required(key("run_dir", FIELD(run_dir), "folder of the run: config.yaml, metrics.jsonl, checkpoints/")),
        }},
        {"model", "What is trained. Keys that a model type does not use are ignored by it.", {
            choice("type", FIELD(model.type),
                   std::vector<std::pair<std::string, ModelType>>{
                       {"transformer", ModelType::transformer},
                       {"mamba2", ModelType::mamba2},
                       {"log_linear_mamba2", ModelType::log_linear_mamba2},
                       {"gated_deltanet", ModelType::gated_deltanet},
                       {"log_linear_gated_deltanet", ModelType::log_linear_gated_deltanet}},
                   "architecture"),
            between(0, max_vocabulary, key("vocab_size", FIELD(model.vocab_size),
                            "number of token ids; 0: that of the token file. On a GPU a multiple of 64 is much faster")),
            required(between(1, max_width, key("hidden_size", FIELD(model.hidden_size), "width of the residual stream"))),
            required(between(1, max_count, key("num_layers", FIELD(model.num_layers), "number of blocks (mixer and MLP)"))),
            between(0, max_width, key("intermediate_size", FIELD(model.intermediate_size),
                            "width of the MLP; 0: 256 * ceil(8/3 * hidden_size / 256)")),
            above(0, key("norm_eps", FIELD(model.norm_eps), "added to the mean square in norms")),
            key("tie_embeddings", FIELD(model.tie_embeddings), "output head shares the embedding's weights"),
            above(0, key("initializer_range", FIELD(model.initializer_range),
                            "standard deviation of initial weights of projections and embedding")),
            required(between(1, max_count, key("num_heads", FIELD(model.num_heads), "heads of the mixer"))),
            between(0, max_count, key("head_dim", FIELD(model.head_dim),
                            "width of a head: of values (Mamba-2), of keys (Gated DeltaNet), of both (Transformer, where 0 "
                            "is hidden_size / num_heads; the others need a value of at least 1)")),
            between(0, max_count, key("num_kv_heads", FIELD(model.num_kv_heads), "Transformer: key/value heads; 0: num_heads")),
            above(0, key("rope_theta", FIELD(model.rope_theta), "Transformer: base of the rotary angles")),
            between(1, max_count, key("state_size", FIELD(model.state_size), "Mamba-2: width of B and C (keys and queries)")),
            between(1, max_count, key("n_groups", FIELD(model.n_groups), "Mamba-2: groups of heads that share B and C")),
            above(0, key("expand_v", FIELD(model.expand_v), "Gated DeltaNet: value width of a head over its key width")),
            between(1, 16, key("conv_width", FIELD(model.conv_width), "Mamba-2, Gated DeltaNet: taps of the short convolution")),
            between(0, 62, key("num_levels", FIELD(model.num_levels),
                               "log-linear models: level scales a head; 0: as many as data.sequence_length needs")),
            choice("level_overflow", FIELD(model.level_overflow),
                   std::vector<std::pair<std::string, ops::LevelOverflow>>{{"clamp", ops::LevelOverflow::clamp},
                                                                           {"error", ops::LevelOverflow::error}},
                   "log-linear models: a sequence that needs more levels uses the last one for them, or is refused"),
            between(16, 256, key("chunk_size", FIELD(model.chunk_size), "tokens of a chunk, a power of two; speed only")),
        }},
        {"data", "What it is trained on: token files made by `fenwick tokenize`.", {
            required(key("train", FIELD(data.train),
                         "the training text: a token file or corpus folder; or a list of these, read as one; or a list of "
                         "`{path: FILE, weight: NUMBER}`, which are mixed: each has a share of the tokens drawn that is proportional "
                         "to its weight, and goes through epochs of its own")),
            key("valid", FIELD(data.valid), "token file or corpus folder of the validation text; empty: no validation"),
            required(between(1, max_batch_tokens, key("sequence_length", FIELD(data.sequence_length), "tokens of a row"))),
            choice("packing", FIELD(data.packing),
                   std::vector<std::pair<std::string, Packing>>{{"stream", Packing::stream},
                                                                {"masked_stream", Packing::masked_stream},
                                                                {"documents", Packing::documents}},
                   "how documents become rows. stream: one after another, cut every sequence_length tokens, a row is one sequence; "
                   "masked_stream: the same rows, but no token sees another document; documents: rows are packed with whole "
                   "documents (longer ones are cut), none of which sees another. Validation does the same"),
            between(0, 1024, key("prefetch", FIELD(data.prefetch),
                                 "micro-batches that a thread of its own prepares while the step runs; 0: none. Never changes results")),
        }},
        {"optimizer", "AdamW with decoupled weight decay.", {
            above(0, key("learning_rate", FIELD(optimizer.learning_rate), "highest learning rate")),
            below(1, at_least(0, key("beta1", FIELD(optimizer.beta1), "decay of the mean of gradients"))),
            below(1, at_least(0, key("beta2", FIELD(optimizer.beta2), "decay of the mean of squared gradients"))),
            above(0, key("eps", FIELD(optimizer.eps), "added to the root of the mean of squared gradients")),
            at_least(0, key("weight_decay", FIELD(optimizer.weight_decay),
                            "decoupled weight decay; never on norms, biases, A_log, dt_bias, D, L")),
            at_least(0, key("clip_norm", FIELD(optimizer.clip_norm), "highest global gradient norm; 0: no clipping")),
        }},
        {"schedule", "The learning rate as a function of the step.", {
            choice("type", FIELD(schedule.type),
                   std::vector<std::pair<std::string, ScheduleType>>{{"cosine", ScheduleType::cosine},
                                                                     {"wsd", ScheduleType::wsd},
                                                                     {"linear", ScheduleType::linear},
                                                                     {"constant", ScheduleType::constant}},
                   "course after warm-up; wsd: constant, then decay over the last decay_steps"),
            between(0, max_steps, key("warmup_steps", FIELD(schedule.warmup_steps), "steps of linear warm-up")),
            between(0, 1, key("min_ratio", FIELD(schedule.min_ratio), "final learning rate over the highest")),
            between(0, max_steps, key("decay_steps", FIELD(schedule.decay_steps), "wsd: steps of the final decay; 0: a tenth of the run")),
            choice("decay_shape", FIELD(schedule.decay_shape),
                   std::vector<std::pair<std::string, DecayShape>>{{"linear", DecayShape::linear}, {"sqrt", DecayShape::sqrt}},
                   "wsd: decay linearly, or as 1 - sqrt(progress)"),
        }},
        {"train", "The loop.", {
            between(0, max_steps, key("steps", FIELD(train.steps), "optimizer steps; 0: from tokens")),
            between(0, max_tokens, key("tokens", FIELD(train.tokens), "instead of steps: tokens to train on, rounded up to whole steps")),
            between(1, max_batch_tokens, key("batch_size", FIELD(train.batch_size), "rows of an optimizer step, over all processes")),
            between(0, max_batch_tokens, key("micro_batch", FIELD(train.micro_batch),
                            "rows of one forward of one process; the rest is accumulated; 0: all at once")),
            at_least(0, key("seed", FIELD(train.seed), "of the initial weights and of the order of the data")),
            key("init_from", FIELD(train.init_from),
                "checkpoint or run folder whose weights the run begins with; empty: drawn from the seed"),
            between(0, max_steps, key("validate_every", FIELD(train.validate_every), "steps between validations; 0: only at the end")),
            between(0, max_tokens, key("validate_tokens", FIELD(train.validate_tokens),
                            "tokens of a validation, rounded up to whole rows; 0: the whole file")),
            between(0, max_steps, key("checkpoint_every", FIELD(train.checkpoint_every), "steps between checkpoints; 0: only at the end")),
            between(0, max_steps, key("keep_checkpoints", FIELD(train.keep_checkpoints),
                            "newest checkpoints that are kept; 0: none is written, as for a benchmark")),
            between(1, max_steps, key("log_every", FIELD(train.log_every), "steps between lines of metrics.jsonl")),
            choice("recompute", FIELD(train.recompute),
                   std::vector<std::pair<std::string, Recompute>>{
                       {"none", Recompute::none}, {"mixer", Recompute::mixer}, {"block", Recompute::block}},
                   "what backward computes again instead of keeping it in memory"),
            choice("dtype", FIELD(train.dtype),
                   std::vector<std::pair<std::string, DType>>{
                       {"float32", DType::float32}, {"bfloat16", DType::bfloat16}, {"float64", DType::float64}},
                   "of activations; weights are float32. bfloat16 needs a GPU; float64 (weights too, CPU only) is for tests"),
            key("tf32", FIELD(train.tf32),
                "float32 on a GPU: matrix products may round their operands to 10 bits of mantissa, several times as fast"),
            choice("device", FIELD(train.device),
                   std::vector<std::pair<std::string, DeviceChoice>>{
                       {"auto", DeviceChoice::automatic}, {"cpu", DeviceChoice::cpu}, {"cuda", DeviceChoice::cuda}},
                   "auto: a GPU where there is one"),
            between(0, 4096, key("num_threads", FIELD(train.num_threads), "threads on the CPU; 0: all cores. Never changes results")),
            choice("on_nan", FIELD(train.on_nan),
                   std::vector<std::pair<std::string, NanPolicy>>{{"stop", NanPolicy::stop}, {"skip", NanPolicy::skip}},
                   "loss or gradient not finite: stop the run, or skip that update"),
        }},
    };
    return sections;
}

std::string full_name(const Section& section, const Key& key) {
    return section.name.empty() ? key.name : section.name + "." + key.name;
}

// ---- nearest names ---------------------------------------------------------------------------------------------------

// Levenshtein distance, one row at a time.
std::size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<std::size_t> row(b.size() + 1);
    for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (std::size_t i = 1; i <= a.size(); ++i) {
        std::size_t diagonal = row[0];
        row[0] = i;
        for (std::size_t j = 1; j <= b.size(); ++j) {
            const std::size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
            diagonal = row[j];
            row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
        }
    }
    return row.back();
}

// " did you mean 'hidden_size'?", or what there is. The same name in another section is the best guess.
std::string suggestion(const Section& section, const std::string& name) {
    for (const auto& other : table()) {
        if (other.name == name && !name.empty()) return fmt::format("'{}' is a section of its own", name);
        for (const auto& key : other.keys)
            if (key.name == name && &other != &section) return fmt::format("did you mean '{}'?", full_name(other, key));
    }
    std::vector<std::string> names;
    for (const auto& key : section.keys) names.push_back(key.name);
    if (section.name.empty())
        for (const auto& other : table())
            if (!other.name.empty()) names.push_back(other.name);
    const auto nearest = std::min_element(names.begin(), names.end(), [&](const auto& a, const auto& b) {
        return edit_distance(a, name) < edit_distance(b, name);
    });
    if (edit_distance(*nearest, name) <= std::max<std::size_t>(2, name.size() / 3))
        return fmt::format("did you mean '{}{}'?", section.name.empty() ? "" : section.name + ".", *nearest);
    return fmt::format("{} are {}", section.name.empty() ? "the keys here" : fmt::format("the keys of '{}'", section.name),
                       fmt::join(names, ", "));
}

// ---- one value -------------------------------------------------------------------------------------------------------

std::string number(double value) { return fmt::format("{}", value); }

// What would be right: "a whole number of at least 1 is needed".
std::string needed(const Key& key) {
    if (!key.choices.empty()) return fmt::format("one of {} is needed", fmt::join(key.choices, ", "));
    if (key.type == "corpora") return "a file name, a list of file names, or a list of {path: FILE, weight: NUMBER} is needed";
    if (key.type == "text" || key.type == "true or false") return key.type + " is needed";
    std::string range;
    if (key.low != -any && key.high != any)
        range = fmt::format(" from {} to {}{}", number(key.low), key.high_open ? "below " : "", number(key.high));
    else if (key.low != -any)
        range = fmt::format(" {} {}", key.low_open ? "above" : "of at least", number(key.low));
    return fmt::format("a {}{} is needed", key.type, range);
}

template <class T>
bool parse_number(const std::string& text, T& value) {
    const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
    const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
    return error == std::errc() && end == text.data() + text.size();
}

// Where a value came from, as errors name it.
struct Source {
    std::string file;      // or "--set a.b=c"
    bool has_line = true;  // false for overrides
    std::string at(const YAML::Mark& mark) const {
        return has_line && mark.line >= 0 ? fmt::format("{}:{}", file, mark.line + 1) : file;
    }
};

std::string shown(const YAML::Node& node) {
    if (node.IsScalar()) return fmt::format("'{}'", node.Scalar());
    return node.IsSequence() ? "a list" : node.IsMap() ? "a mapping" : "empty";
}

// One entry of a list of corpora: a file name, or {path, weight}.
data::WeightedCorpus read_corpus(const Key& key, const std::string& name, const YAML::Node& node, const Source& source) {
    const std::string at = source.at(node.Mark());
    if (node.IsScalar() && node.Scalar().empty()) fail("{}: {} holds an empty name; {}", at, name, needed(key));
    if (node.IsScalar()) return {node.Scalar()};
    if (!node.IsMap()) fail("{}: {} holds {}; {}", at, name, shown(node), needed(key));
    data::WeightedCorpus corpus;
    for (const auto& entry : node) {
        const std::string field = entry.first.IsScalar() ? entry.first.Scalar() : "";
        const std::string text = entry.second.IsScalar() ? entry.second.Scalar() : "";
        if (field == "path") {
            if (text.empty()) fail("{}: a path in {} is {}; a file name is needed", at, name, shown(entry.second));
            corpus.path = text;
        } else if (field == "weight") {
            if (!parse_number(text, corpus.weight) || !std::isfinite(corpus.weight) || corpus.weight <= 0)
                fail("{}: a weight in {} is {}; a number above 0 is needed", at, name, shown(entry.second));
        } else {
            fail("{}: {} holds the key {}; path and weight are needed", at, name, shown(entry.first));
        }
    }
    if (corpus.path.empty() || corpus.weight == 0)
        fail("{}: an entry of {} has no {}; {}", at, name, corpus.path.empty() ? "path" : "weight", needed(key));
    return corpus;
}

std::vector<data::WeightedCorpus> read_corpora(const Key& key, const std::string& name, const YAML::Node& node, const std::string& at,
                                               const Source& source) {
    std::vector<data::WeightedCorpus> corpora;
    for (const auto& item : node) {
        corpora.push_back(read_corpus(key, name, item, source));
        if ((corpora.front().weight > 0) != (corpora.back().weight > 0))
            fail("{}: {} gives some files a weight and some none; give it to all or to none", source.at(item.Mark()), name);
    }
    if (corpora.empty()) fail("{}: {} is an empty list; {}", at, name, needed(key));
    return corpora;
}

// `at`: file and line of the key, for errors.
Value read_value(const Key& key, const std::string& name, const YAML::Node& node, const std::string& at, const Source& source) {
    const auto wrong = [&] { fail("{}: {} is {}; {}", at, name, shown(node), needed(key)); };
    if (key.type == "corpora" && node.IsSequence()) return read_corpora(key, name, node, at, source);
    const bool text = key.type == "text";
    if (!node.IsScalar() && !(text && node.IsNull())) wrong();
    const std::string scalar = node.IsScalar() ? node.Scalar() : "";
    if (text && !key.required) return scalar;
    if (scalar.empty()) fail("{}: {} is empty; {}", at, name, needed(key));
    if (text) return scalar;
    if (key.type == "corpora") return std::vector<data::WeightedCorpus>{{scalar}};
    if (key.type == "choice") {
        if (std::find(key.choices.begin(), key.choices.end(), scalar) == key.choices.end()) wrong();
        return scalar;
    }
    if (key.type == "true or false") {
        if (scalar != "true" && scalar != "false") wrong();
        return scalar == "true";
    }
    const auto in_range = [&](double value) {
        return (key.low_open ? value > key.low : value >= key.low) && (key.high_open ? value < key.high : value <= key.high);
    };
    if (key.type == "whole number") {
        std::int64_t value = 0;
        if (!parse_number(scalar, value) || !in_range(static_cast<double>(value))) wrong();
        return value;
    }
    double value = 0;
    if (!parse_number(scalar, value) || !std::isfinite(value) || !in_range(value)) wrong();
    return value;
}

// Of the one document that `text` holds.
YAML::Node parse_yaml(const std::string& text, const Source& source) {
    try {
        const std::vector<YAML::Node> documents = YAML::LoadAll(text);
        if (documents.size() > 1)
            fail("{}: a second document begins after '---'; a config is one document", source.at(documents[1].Mark()));
        return documents.empty() ? YAML::Node() : documents.front();
    } catch (const YAML::Exception& error) {
        fail("{}: not valid YAML: {}", source.at(error.mark), error.msg);
    }
}

// ---- a file ----------------------------------------------------------------------------------------------------------

const Section* find_section(std::string_view name) {
    for (const auto& section : table())
        if (section.name == name) return &section;
    return nullptr;
}

const Key* find_key(const Section& section, std::string_view name) {
    for (const auto& key : section.keys)
        if (key.name == name) return &key;
    return nullptr;
}

// The largest divisor of `value` that is at most `limit`.
std::int64_t divisor_up_to(std::int64_t value, std::int64_t limit) {
    std::int64_t best = 1;
    for (std::int64_t divisor = 1; divisor * divisor <= value; ++divisor)
        if (value % divisor == 0)
            for (const std::int64_t found : {divisor, value / divisor})
                if (found <= limit) best = std::max(best, found);
    return best;
}

class Reader {
public:
    RunConfig config;

    void file(std::string_view text, const std::string& origin) {
        origin_ = origin;
        const Source source{origin};
        const YAML::Node root = parse_yaml(std::string(text), source);
        if (root.IsNull()) return;
        if (!root.IsMap()) fail("{}: {} stands at the top level; sections such as 'model:' are needed", source.at(root.Mark()),
                                root.IsScalar() ? "text" : "a list");
        mapping(*find_section(""), root, source);
    }

    void override_with(const std::string& assignment) {
        const Source source{"--set " + assignment, false};
        const auto equals = assignment.find('=');
        if (equals == std::string::npos || equals == 0)
            fail("--set {}: a key, '=' and a value are needed, as in --set train.steps=100", assignment);
        const std::string name = assignment.substr(0, equals);
        const auto dot = name.find('.');
        if (dot == 0) fail("{}: the section before '.' is empty; a key is needed, as in --set train.steps=100", source.file);
        const std::string section_name = dot == std::string::npos ? "" : name.substr(0, dot);
        const std::string key_name = dot == std::string::npos ? name : name.substr(dot + 1);
        const Section* section = find_section(section_name);
        if (section == nullptr)
            fail("{}: unknown section '{}'; {}", source.file, section_name, suggestion(*find_section(""), section_name));
        const Key* key = find_key(*section, key_name);
        if (key == nullptr) fail("{}: unknown key '{}'; {}", source.file, name, suggestion(*section, key_name));
        assign(*section, *key, parse_yaml(assignment.substr(equals + 1), source), source.file, source);
    }

    void finish() {
        for (const auto& section : table())
            for (const auto& key : section.keys)
                if (key.required && !given_.contains(full_name(section, key)))
                    fail("{}: {} is missing: {}", origin_, full_name(section, key), key.doc);
        derive();
    }

private:
    std::string origin_;
    std::set<std::string> given_;

    void mapping(const Section& section, const YAML::Node& node, const Source& source) {
        std::set<std::string> seen;
        for (const auto& entry : node) {
            if (!entry.first.IsScalar()) fail("{}: a key is {}; a name is needed", source.at(entry.first.Mark()), shown(entry.first));
            const std::string name = entry.first.Scalar();
            const std::string full = section.name.empty() ? name : section.name + "." + name;
            const std::string at = source.at(entry.first.Mark());
            if (name.empty()) fail("{}: a key is empty; a name is needed", at);
            if (!seen.insert(name).second) fail("{}: '{}' stands twice; keep one", at, full);
            if (const Key* key = find_key(section, name)) {
                assign(section, *key, entry.second, at, source);
            } else if (const Section* inner = section.name.empty() ? find_section(name) : nullptr; inner) {
                if (entry.second.IsNull()) continue;
                if (!entry.second.IsMap())
                    fail("{}: section '{}' is {}; keys and values are needed below it", at, name, shown(entry.second));
                mapping(*inner, entry.second, source);
            } else {
                fail("{}: unknown key '{}'; {}", at, full, suggestion(section, name));
            }
        }
    }

    void assign(const Section& section, const Key& key, const YAML::Node& node, const std::string& at, const Source& source) {
        const std::string name = full_name(section, key);
        key.set(config, read_value(key, name, node, at, source));
        given_.insert(name);
    }

    // Values that follow from others, and contradictions between keys.
    void derive() {
        auto& train = config.train;
        const auto& data = config.data;
        if (train.steps == 0 && train.tokens == 0)
            fail("{}: neither train.steps nor train.tokens is given; one of them is needed", origin_);
        if (train.steps != 0 && train.tokens != 0)
            fail("{}: train.steps is {} and train.tokens is {}; only one of them can hold, drop the other", origin_, train.steps,
                 train.tokens);
        if (train.batch_size > max_batch_tokens / data.sequence_length)
            fail("{}: train.batch_size {} times data.sequence_length {} is more than {} tokens a step; lower one of them "
                 "(train.batch_size to at most {})",
                 origin_, train.batch_size, data.sequence_length, max_batch_tokens, max_batch_tokens / data.sequence_length);
        const std::int64_t tokens_a_step = train.batch_size * data.sequence_length;
        if (train.steps == 0) {
            train.steps = (train.tokens + tokens_a_step - 1) / tokens_a_step;
            train.tokens = 0;
        }
        auto& schedule = config.schedule;
        if (schedule.type == ScheduleType::wsd && schedule.decay_steps == 0)
            schedule.decay_steps = std::min(std::max<std::int64_t>(1, train.steps / 10),
                                            std::max<std::int64_t>(1, train.steps - schedule.warmup_steps));
        const std::int64_t scheduled =
            schedule.warmup_steps + (schedule.type == ScheduleType::wsd ? schedule.decay_steps : 0);
        if (scheduled > train.steps)
            fail("{}: schedule.warmup_steps {}{} do not fit into train.steps {}; lower them, or raise train.steps to {}",
                 origin_, schedule.warmup_steps,
                 schedule.type == ScheduleType::wsd ? fmt::format(" and schedule.decay_steps {}", schedule.decay_steps) : "",
                 train.steps, scheduled);
        if (train.micro_batch > 0 && train.batch_size % train.micro_batch != 0)
            fail("{}: train.batch_size {} is not a multiple of train.micro_batch {}; set train.micro_batch to {}, or train.batch_size "
                 "to {}",
                 origin_, train.batch_size, train.micro_batch, divisor_up_to(train.batch_size, train.micro_batch),
                 (train.batch_size / train.micro_batch + 1) * train.micro_batch);
        if (train.dtype == DType::bfloat16 && train.device == DeviceChoice::cpu)
            fail("{}: train.dtype is bfloat16 and train.device is cpu; the CPU computes in float32", origin_);
        if (train.dtype == DType::float64 && train.device == DeviceChoice::cuda)
            fail("{}: train.dtype is float64 and train.device is cuda; the GPU computes in float32 or bfloat16", origin_);
        if (model::has_levels(config.model.type)) {
            const std::int64_t levels = std::bit_width(static_cast<std::uint64_t>(data.sequence_length - 1)) + 1;
            if (config.model.num_levels == 0) config.model.num_levels = levels;
            if (config.model.num_levels < levels && config.model.level_overflow == ops::LevelOverflow::error)
                fail("{}: data.sequence_length {} needs {} levels, model.num_levels is {} and model.level_overflow is error; "
                     "use {} levels or level_overflow clamp",
                     origin_, data.sequence_length, levels, config.model.num_levels, levels);
        }
        model::ModelConfig complete = config.model;
        if (complete.vocab_size == 0) complete.vocab_size = 1;  // the token file will say
        try {
            complete.validate();
        } catch (const Error& error) {
            fail("{}: {}", origin_, error.what());
        }
    }
};

// ---- YAML out --------------------------------------------------------------------------------------------------------

// Quoted where YAML might read something else than this text.
std::string quoted(const std::string& text) {
    const bool plain = !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
        return std::isalnum(c) || c == '_' || c == '/' || c == '.' || c == '-';
    }) && text.find_first_not_of("0123456789.-_") != std::string::npos && text.front() != '-' && text.front() != '.' &&
                       text != "null" && text != "Null" && text != "NULL";
    if (plain) return text;
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') out += '\\';
        const auto byte = static_cast<unsigned char>(c);
        if (byte < 0x20 || byte == 0x7f)
            out += fmt::format("\\x{:02x}", byte);
        else
            out += c;
    }
    return out + "\"";
}

std::string text_of(const Value& value) {
    if (const auto* whole = std::get_if<std::int64_t>(&value)) return fmt::format("{}", *whole);
    if (const auto* real = std::get_if<double>(&value)) return number(*real);
    if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
    if (const auto* text = std::get_if<std::string>(&value)) return quoted(*text);
    std::vector<std::string> items;
    for (const auto& corpus : std::get<std::vector<data::WeightedCorpus>>(value))
        items.push_back(corpus.weight > 0 ? fmt::format("{{path: {}, weight: {}}}", quoted(corpus.path), number(corpus.weight))
                                          : quoted(corpus.path));
    return fmt::format("[{}]", fmt::join(items, ", "));
}

}  // namespace

RunConfig parse_config(std::string_view text, const std::string& origin, const std::vector<std::string>& overrides) {
    Reader reader;
    reader.file(text, origin);
    for (const auto& assignment : overrides) reader.override_with(assignment);
    reader.finish();
    return reader.config;
}

RunConfig load_config(const std::string& path, const std::vector<std::string>& overrides) {
    return parse_config(read_file(path), path, overrides);
}

void resolve_for_processes(RunConfig& config, int processes) {
    auto& train = config.train;
    FENWICK_CHECK(train.batch_size % processes == 0,
                  "train.batch_size {} does not divide among {} processes; {} would", train.batch_size, processes,
                  (train.batch_size / processes + 1) * processes);
    const std::int64_t share = train.batch_size / processes;
    if (train.micro_batch == 0) train.micro_batch = share;
    FENWICK_CHECK(share % train.micro_batch == 0,
                  "train.batch_size {} is not a multiple of train.micro_batch {} times {} processes; train.micro_batch {} or "
                  "train.batch_size {} would fit",
                  train.batch_size, train.micro_batch, processes, share,
                  (train.batch_size / (train.micro_batch * processes) + 1) * train.micro_batch * processes);
}

std::string yaml_text(const std::string& text) { return quoted(text); }

std::string to_yaml(const RunConfig& config) {
    std::string out;
    for (const auto& section : table()) {
        if (!section.name.empty()) out += fmt::format("{}:\n", section.name);
        for (const auto& key : section.keys)
            out += fmt::format("{}{}: {}\n", section.name.empty() ? "" : "  ", key.name, text_of(key.get(config)));
    }
    return out;
}

std::vector<Difference> differences(const RunConfig& theirs, const RunConfig& ours, std::string_view section_name) {
    std::vector<Difference> found;
    for (const auto& section : table()) {
        if (!section_name.empty() && section.name != section_name) continue;
        for (const auto& key : section.keys)
            if (const Value a = key.get(theirs), b = key.get(ours); a != b)
                found.push_back({full_name(section, key), text_of(a), text_of(b)});
    }
    return found;
}

std::string configuration_markdown() {
    std::string out =
        "# Configuration\n\n"
        "`fenwick train CONFIG.yaml` reads these keys; `--set section.key=value` overrides any of them. Every run folder\n"
        "holds the resolved configuration in `config.yaml`. This page is made from the table in `src/train/config.cpp`; a\n"
        "test keeps the two equal (`FENWICK_UPDATE_DOCS=1 build/tests/train_test` writes it anew).\n";
    const RunConfig defaults;
    for (const auto& section : table()) {
        out += fmt::format("\n## {}\n\n", section.name.empty() ? section.doc : fmt::format("`{}`", section.name));
        if (!section.name.empty()) out += section.doc + "\n\n";
        out += "| key | type | default | allowed | meaning |\n|---|---|---|---|---|\n";
        for (const auto& key : section.keys) {
            std::string allowed;
            if (!key.choices.empty()) {
                std::vector<std::string> names;
                for (const auto& name : key.choices) names.push_back(fmt::format("`{}`", name));
                allowed = fmt::format("{}", fmt::join(names, ", "));
            } else if (key.low != -any && key.high != any) {
                allowed = fmt::format("{} to {}{}", number(key.low), key.high_open ? "below " : "", number(key.high));
            } else if (key.low != -any) {
                allowed = fmt::format("{} {}", key.low_open ? ">" : "≥", number(key.low));
            }
            const std::string value = text_of(key.get(defaults));
            out += fmt::format("| `{}` | {} | {} | {} | {} |\n", key.name, key.type,
                               key.required ? "required" : value == "\"\"" ? "empty" : fmt::format("`{}`", value), allowed,
                               key.doc);
        }
    }
    return out;
}

}  // namespace fenwick::train
