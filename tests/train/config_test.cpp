#include "train/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "base/files.h"

namespace fenwick::train {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

constexpr const char* minimal = R"(run_dir: runs/a
model:
  type: log_linear_mamba2
  hidden_size: 64
  num_layers: 2
  num_heads: 4
  head_dim: 32
data:
  train: a.h5
  sequence_length: 300
train:
  steps: 100
)";

std::string error_of(const std::string& text, const std::vector<std::string>& overrides = {}) {
    try {
        parse_config(text, "a.yaml", overrides);
    } catch (const Error& error) {
        return error.what();
    }
    return "no error";
}

// The minimal file with one line changed.
std::string with(const std::string& from, const std::string& to) {
    std::string text = minimal;
    const auto at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
}

TEST(Config, ReadsAFileAndFillsInDefaults) {
    const RunConfig config = parse_config(minimal, "a.yaml");
    EXPECT_EQ(config.run_dir, "runs/a");
    EXPECT_EQ(config.model.type, model::ModelType::log_linear_mamba2);
    EXPECT_EQ(config.model.hidden_size, 64);
    EXPECT_EQ(config.model.num_levels, 10);  // bit_width(299) + 1
    EXPECT_EQ(config.data.train, (std::vector<data::WeightedCorpus>{{"a.h5"}}));
    EXPECT_EQ(config.data.packing, data::Packing::stream);
    EXPECT_EQ(config.data.valid, "");
    EXPECT_EQ(config.optimizer.beta2, 0.95);
    EXPECT_EQ(config.train.steps, 100);
    EXPECT_EQ(config.train.keep_checkpoints, 2);
    EXPECT_FALSE(config.train.tf32);
}

TEST(Config, ListsNumbersAndChoices) {
    const RunConfig config = parse_config(with("train: a.h5", "train: [a.h5, 'b c.h5']"), "a.yaml",
                                          {"optimizer.learning_rate=3e-4", "schedule.type=wsd", "schedule.warmup_steps=10",
                                           "model.tie_embeddings=true", "train.on_nan=skip", "run_dir=x/y",
                                           "data.valid=v.h5", "train.dtype=float64", "train.tf32=true"});
    EXPECT_EQ(config.data.train, (std::vector<data::WeightedCorpus>{{"a.h5"}, {"b c.h5"}}));
    EXPECT_EQ(config.optimizer.learning_rate, 3e-4);
    EXPECT_EQ(config.schedule.type, ScheduleType::wsd);
    EXPECT_EQ(config.schedule.decay_steps, 10);
    EXPECT_TRUE(config.model.tie_embeddings);
    EXPECT_EQ(config.train.on_nan, NanPolicy::skip);
    EXPECT_TRUE(config.train.tf32);
    EXPECT_EQ(config.run_dir, "x/y");
    EXPECT_EQ(config.weight_dtype(), DType::float64);
}

TEST(Config, Mixtures) {
    const std::string mixed = with("train: a.h5", "train:\n  - {path: a.h5, weight: 0.7}\n  - path: 'b: c'\n    weight: 1e3");
    const RunConfig config = parse_config(mixed, "a.yaml", {"data.packing=documents"});
    EXPECT_EQ(config.data.train, (std::vector<data::WeightedCorpus>{{"a.h5", 0.7}, {"b: c", 1000}}));
    EXPECT_EQ(config.data.packing, data::Packing::documents);
    EXPECT_EQ(parse_config(minimal, "a.yaml", {"data.train=[{path: x, weight: 2}]"}).data.train,
              (std::vector<data::WeightedCorpus>{{"x", 2}}));
    const RunConfig again = parse_config(to_yaml(config), "b.yaml");
    EXPECT_EQ(again.data.train, config.data.train);
    EXPECT_TRUE(differences(config, again, "").empty());
    EXPECT_THAT(to_yaml(config), HasSubstr("  train: [{path: a.h5, weight: 0.7}, {path: \"b: c\", weight: 1000}]\n"));
    EXPECT_EQ(differences(config, parse_config(mixed, "a.yaml", {"data.train=[{path: a.h5, weight: 0.8}]"}), "data")[0].ours,
              "[{path: a.h5, weight: 0.8}]");

    const auto error = [](const std::string& corpora) { return error_of(with("train: a.h5", "train: " + corpora)); };
    const std::string needed = "; a file name, a list of file names, or a list of {path: FILE, weight: NUMBER} is needed";
    EXPECT_EQ(error("[a, {path: b, weight: 1}]"), "a.yaml:9: data.train gives some files a weight and some none; give it to all or to none");
    EXPECT_EQ(error("[{path: b}]"), "a.yaml:9: an entry of data.train has no weight" + needed);
    EXPECT_EQ(error("[{weight: 1}]"), "a.yaml:9: an entry of data.train has no path" + needed);
    EXPECT_EQ(error("[{}]"), "a.yaml:9: an entry of data.train has no path" + needed);
    EXPECT_EQ(error("{path: b, weight: 1}"), "a.yaml:9: data.train is a mapping" + needed);
    EXPECT_EQ(error("[{path: b, share: 1}]"), "a.yaml:9: data.train holds the key 'share'; path and weight are needed");
    EXPECT_EQ(error("[{path: [b], weight: 1}]"), "a.yaml:9: a path in data.train is a list; a file name is needed");
    for (const std::string bad : {"0", "-1", "nan", "inf", "one", "''"})
        EXPECT_THAT(error("[{path: b, weight: " + bad + "}]"), HasSubstr("a number above 0 is needed"));
    EXPECT_EQ(error_of(minimal, {"data.packing=docs"}),
              "--set data.packing=docs: data.packing is 'docs'; one of stream, masked_stream, documents is needed");
}

TEST(Config, StepsFromTokens) {
    // 8 rows of 300 tokens a step
    EXPECT_EQ(parse_config(with("steps: 100", "tokens: 24001"), "a.yaml").train.steps, 11);
    EXPECT_EQ(error_of(with("steps: 100", "seed: 1")),
              "a.yaml: neither train.steps nor train.tokens is given; one of them is needed");
    EXPECT_EQ(error_of(minimal, {"train.tokens=5000"}),
              "a.yaml: train.steps is 100 and train.tokens is 5000; only one of them can hold, drop the other");
}

TEST(Config, UnknownKeysNameTheNearest) {
    EXPECT_EQ(error_of(with("hidden_size", "hiden_size")),
              "a.yaml:4: unknown key 'model.hiden_size'; did you mean 'model.hidden_size'?");
    EXPECT_EQ(error_of(with("  steps: 100", "  learning_rate: 1")),
              "a.yaml:12: unknown key 'train.learning_rate'; did you mean 'optimizer.learning_rate'?");
    EXPECT_EQ(error_of(with("data:", "dta:")), "a.yaml:8: unknown key 'dta'; did you mean 'data'?");
    EXPECT_EQ(error_of(with("  train: a.h5", "  qqqqqqqqqq: 1")),
              "a.yaml:9: unknown key 'data.qqqqqqqqqq'; the keys of 'data' are train, valid, sequence_length, packing, prefetch");
    EXPECT_EQ(error_of(std::string(minimal) + "steps: 5\n"), "a.yaml:13: unknown key 'steps'; did you mean 'train.steps'?");
}

TEST(Config, WrongTypesAndRanges) {
    EXPECT_EQ(error_of(with("steps: 100", "steps: ten")), "a.yaml:12: train.steps is 'ten'; a whole number from 0 to 1000000000000 is needed");
    EXPECT_EQ(error_of(with("steps: 100", "steps: 1.5")), "a.yaml:12: train.steps is '1.5'; a whole number from 0 to 1000000000000 is needed");
    EXPECT_EQ(error_of(with("steps: 100", "steps: [1, 2]")), "a.yaml:12: train.steps is a list; a whole number from 0 to 1000000000000 is needed");
    EXPECT_EQ(error_of(with("steps: 100", "steps:")), "a.yaml:12: train.steps is empty; a whole number from 0 to 1000000000000 is needed");
    EXPECT_EQ(error_of(with("steps: 100", "steps: 99999999999999999999")),
              "a.yaml:12: train.steps is '99999999999999999999'; a whole number from 0 to 1000000000000 is needed");
    EXPECT_EQ(error_of(with("hidden_size: 64", "hidden_size: 0")),
              "a.yaml:4: model.hidden_size is '0'; a whole number from 1 to 1048576 is needed");
    EXPECT_EQ(error_of(with("type: log_linear_mamba2", "type: mamba")),
              "a.yaml:3: model.type is 'mamba'; one of transformer, mamba2, log_linear_mamba2, gated_deltanet, "
              "log_linear_gated_deltanet is needed");
    EXPECT_EQ(error_of(with("train: a.h5", "train: []")),
              "a.yaml:9: data.train is an empty list; a file name, a list of file names, or a list of {path: FILE, weight: NUMBER} is needed");
    EXPECT_EQ(error_of(with("train: a.h5", "train: [a.h5, [b]]")),
              "a.yaml:9: data.train holds a list; a file name, a list of file names, or a list of {path: FILE, weight: NUMBER} is needed");
    EXPECT_EQ(error_of(with("num_layers: 2", "tie_embeddings: yes")),
              "a.yaml:5: model.tie_embeddings is 'yes'; true or false is needed");
}

// The largest numbers there are, in every key that takes one, alone and together, end in a message or a configuration.
TEST(Config, HugeNumbers) {
    const std::vector<std::string> keys{
        "model.vocab_size", "model.hidden_size", "model.num_layers", "model.intermediate_size", "model.num_heads", "model.head_dim",
        "model.num_kv_heads", "model.state_size", "model.n_groups", "model.conv_width", "model.num_levels", "model.chunk_size",
        "data.sequence_length", "schedule.warmup_steps", "schedule.decay_steps", "train.steps", "train.tokens", "train.batch_size",
        "train.micro_batch", "train.validate_every", "train.validate_tokens", "train.checkpoint_every", "train.keep_checkpoints",
        "train.log_every", "train.num_threads"};
    for (const auto& key : keys)
        for (const std::string huge : {"9223372036854775807", "9223372036854775808", "4611686018427387904"})
            EXPECT_THAT(error_of(minimal, {key + "=" + huge}),
                        testing::AllOf(StartsWith("--set " + key + "=" + huge + ": " + key + " is '" + huge + "'; a whole number from "),
                                       HasSubstr(" to ")));
    // Within their own bounds, but not together.
    for (const std::int64_t a : {std::int64_t{1} << 31, std::int64_t{1} << 24, (std::int64_t{1} << 31) - 1})
        EXPECT_EQ(error_of(minimal, {fmt::format("train.batch_size={}", a), "data.sequence_length=4294967", "train.steps=0",
                                     "train.tokens=1000"}),
                  fmt::format("a.yaml: train.batch_size {} times data.sequence_length 4294967 is more than 2147483648 tokens a step; "
                              "lower one of them (train.batch_size to at most 500)", a));
    EXPECT_EQ(error_of(minimal, {"train.batch_size=4294967296", "data.sequence_length=4294967296", "train.steps=0", "train.tokens=1000"}),
              "--set train.batch_size=4294967296: train.batch_size is '4294967296'; a whole number from 1 to 2147483648 is needed");
    EXPECT_EQ(parse_config(minimal, "a.yaml", {"train.batch_size=2147483648", "data.sequence_length=1", "train.steps=0",
                                               "train.tokens=1000000000000000"}).train.steps, 465662);
    EXPECT_THAT(error_of(minimal, {"schedule.type=wsd", "schedule.decay_steps=1000000000000", "schedule.warmup_steps=1000000000000"}),
                HasSubstr("do not fit into train.steps 100"));
    EXPECT_EQ(error_of(minimal, {"train.batch_size=2147483647", "data.sequence_length=1", "train.micro_batch=2147483646"}),
              "a.yaml: train.batch_size 2147483647 is not a multiple of train.micro_batch 2147483646; set train.micro_batch to 1, or "
              "train.batch_size to 4294967292");
    EXPECT_EQ(error_of(minimal, {"train.batch_size=2", "train.micro_batch=4"}),
              "a.yaml: train.batch_size 2 is not a multiple of train.micro_batch 4; set train.micro_batch to 2, or train.batch_size to 4");
}

TEST(Config, EmptyTextsAndNames) {
    for (const std::string empty : {"", "''", "null", "~"}) {
        EXPECT_EQ(error_of(with("run_dir: runs/a", "run_dir: " + empty)), "a.yaml:1: run_dir is empty; text is needed");
        EXPECT_EQ(error_of(minimal, {"run_dir=" + empty}), "--set run_dir=" + empty + ": run_dir is empty; text is needed");
        EXPECT_THAT(error_of(with("train: a.h5", "train: " + empty)), StartsWith("a.yaml:9: data.train is empty; a file name"));
        EXPECT_EQ(parse_config(minimal, "a.yaml", {"data.valid=" + empty}).data.valid, "");
    }
    EXPECT_EQ(error_of(with("train: a.h5", "train: [a.h5, '']")),
              "a.yaml:9: data.train holds an empty name; a file name, a list of file names, or a list of {path: FILE, weight: NUMBER} is needed");
    EXPECT_EQ(error_of(std::string(minimal) + "'': 3\n"), "a.yaml:13: a key is empty; a name is needed");
    EXPECT_EQ(error_of(std::string(minimal) + "  '': 3\n"), "a.yaml:13: a key is empty; a name is needed");
    EXPECT_THAT(error_of(minimal, {"train.=3"}), StartsWith("--set train.=3: unknown key 'train.'; the keys of 'train' are steps"));
    EXPECT_THAT(error_of(minimal, {".run_dir=x"}), StartsWith("--set .run_dir=x: the section before '.' is empty"));
}

// Any text comes back as it was.
TEST(Config, YamlTextReadsBack) {
    for (const std::string text : {"a", "null", "NULL", "true", "12", "~", "a #b", "a: b", "*a", "&a", "- a", "[a]", "{a}", "a\"b\\c", "%a",
                                   "a\tb", "a\nb", "a\r\nb", " a ", "'", "!a", "@a", "`a", "---", "caf\xc3\xa9",
                                   "a\x01\x1b[31m\x7f" "b"})
        EXPECT_EQ(parse_config(minimal, "a.yaml", {"run_dir=" + yaml_text(text)}).run_dir, text);
}

TEST(Config, BadStructure) {
    EXPECT_EQ(error_of(std::string(minimal) + "---\nmodel: {num_layers: 3}\n"),
              "a.yaml:14: a second document begins after '---'; a config is one document");
    EXPECT_THAT(error_of(std::string(minimal) + "---\n"), HasSubstr("a second document begins after '---'"));
    EXPECT_THAT(error_of(minimal, {"run_dir=a\n---\nb"}), HasSubstr("a second document begins after '---'"));
    EXPECT_EQ(parse_config("---\n" + std::string(minimal) + "...\n", "a.yaml").train.steps, 100);
    EXPECT_EQ(error_of(with("num_layers: 2", "hidden_size: 2")), "a.yaml:5: 'model.hidden_size' stands twice; keep one");
    EXPECT_EQ(error_of(std::string(minimal) + "model:\n  vocab_size: 3\n"), "a.yaml:13: 'model' stands twice; keep one");
    EXPECT_EQ(error_of("- a\n- b\n"), "a.yaml:1: a list stands at the top level; sections such as 'model:' are needed");
    EXPECT_EQ(error_of("model: 3\n"), "a.yaml:1: section 'model' is '3'; keys and values are needed below it");
    EXPECT_THAT(error_of("model:\n  type: [a\n"), StartsWith("a.yaml:3: not valid YAML: "));
    EXPECT_THAT(error_of("model:\n\ttype: a\n"), HasSubstr("a.yaml:2: not valid YAML: "));
    EXPECT_EQ(error_of(""), "a.yaml: run_dir is missing: folder of the run: config.yaml, metrics.jsonl, checkpoints/");
    EXPECT_EQ(error_of(with("  num_layers: 2\n", "")), "a.yaml: model.num_layers is missing: number of blocks (mixer and MLP)");
    EXPECT_EQ(error_of("1: 2\n"), "a.yaml:1: unknown key '1'; the keys here are run_dir, model, data, optimizer, schedule, train");
}

TEST(Config, OverridesAreCheckedAsTheFileIs) {
    EXPECT_EQ(parse_config(minimal, "a.yaml", {"train.steps=7"}).train.steps, 7);
    EXPECT_EQ(error_of(minimal, {"train.step=7"}), "--set train.step=7: unknown key 'train.step'; did you mean 'train.steps'?");
    EXPECT_EQ(error_of(minimal, {"data.trian=a.h5"}), "--set data.trian=a.h5: unknown key 'data.trian'; did you mean 'data.train'?");
    EXPECT_EQ(error_of(minimal, {"trian.steps=7"}), "--set trian.steps=7: unknown section 'trian'; did you mean 'train'?");
    EXPECT_EQ(error_of(minimal, {"steps=7"}), "--set steps=7: unknown key 'steps'; did you mean 'train.steps'?");
    EXPECT_EQ(error_of(minimal, {"train.steps"}),
              "--set train.steps: a key, '=' and a value are needed, as in --set train.steps=100");
    EXPECT_EQ(error_of(minimal, {"optimizer.beta1=1"}),
              "--set optimizer.beta1=1: optimizer.beta1 is '1'; a number from 0 to below 1 is needed");
    EXPECT_EQ(error_of(minimal, {"optimizer.learning_rate=0"}),
              "--set optimizer.learning_rate=0: optimizer.learning_rate is '0'; a number above 0 is needed");
    EXPECT_EQ(error_of(minimal, {"optimizer.learning_rate=nan"}),
              "--set optimizer.learning_rate=nan: optimizer.learning_rate is 'nan'; a number above 0 is needed");
    EXPECT_THAT(error_of(minimal, {"train.steps=[1"}), StartsWith("--set train.steps=[1: not valid YAML: "));
    // An override can supply what the file lacks.
    EXPECT_EQ(parse_config(with("  num_layers: 2\n", ""), "a.yaml", {"model.num_layers=3"}).model.num_layers, 3);
}

TEST(Config, Contradictions) {
    EXPECT_EQ(error_of(minimal, {"train.batch_size=10", "train.micro_batch=4"}),
              "a.yaml: train.batch_size 10 is not a multiple of train.micro_batch 4; set train.micro_batch to 2, or train.batch_size to 12");
    EXPECT_EQ(error_of(minimal, {"schedule.warmup_steps=101"}),
              "a.yaml: schedule.warmup_steps 101 do not fit into train.steps 100; lower them, or raise train.steps to 101");
    EXPECT_EQ(error_of(minimal, {"schedule.type=wsd", "schedule.warmup_steps=60", "schedule.decay_steps=60"}),
              "a.yaml: schedule.warmup_steps 60 and schedule.decay_steps 60 do not fit into train.steps 100; lower them, or raise "
              "train.steps to 120");
    EXPECT_EQ(error_of(minimal, {"model.chunk_size=48"}),
              "a.yaml: model.chunk_size is 48; use 16, 32, 64, 128 or 256");
    EXPECT_EQ(error_of(minimal, {"train.dtype=bfloat16", "train.device=cpu"}),
              "a.yaml: train.dtype is bfloat16 and train.device is cpu; the CPU computes in float32");

    EXPECT_EQ(error_of(minimal, {"model.num_levels=9", "model.level_overflow=error"}),
              "a.yaml: data.sequence_length 300 needs 10 levels, model.num_levels is 9 and model.level_overflow is error; use 10 "
              "levels or level_overflow clamp");
    EXPECT_EQ(error_of(minimal, {"model.n_groups=3"}),
              "a.yaml: model.num_heads 4 is not divisible by model.n_groups 3; use 2");

    RunConfig config = parse_config(minimal, "a.yaml", {"train.batch_size=12"});
    RunConfig copy = config;
    resolve_for_processes(copy, 4);
    EXPECT_EQ(copy.train.micro_batch, 3);
    copy = config;
    copy.train.micro_batch = 2;
    try {
        resolve_for_processes(copy, 4);
        FAIL();
    } catch (const Error& error) {
        EXPECT_STREQ(error.what(), "train.batch_size 12 is not a multiple of train.micro_batch 2 times 4 processes; "
                                   "train.micro_batch 3 or train.batch_size 16 would fit");
    }
    EXPECT_THROW(resolve_for_processes(config, 5), Error);
}

TEST(Config, ResolvedYamlGivesTheSameConfiguration) {
    const RunConfig config =
        parse_config(minimal, "a.yaml", {"data.train=[a.h5, \"x: #1.h5\", '12']", "optimizer.eps=1e-12", "train.seed=123456789012345",
                                         "schedule.type=wsd", "data.valid=\"a\\\"b\"", "run_dir='my runs/a'"});
    const RunConfig again = parse_config(to_yaml(config), "b.yaml");
    EXPECT_EQ(to_yaml(again), to_yaml(config));
    EXPECT_TRUE(differences(config, again, "").empty());
    EXPECT_EQ(again.data.train, (std::vector<data::WeightedCorpus>{{"a.h5"}, {"x: #1.h5"}, {"12"}}));
    EXPECT_EQ(again.data.valid, "a\"b");
    EXPECT_THAT(to_yaml(config), HasSubstr("\noptimizer:\n  learning_rate: 0.001\n"));
}

TEST(Config, Differences) {
    const RunConfig a = parse_config(minimal, "a.yaml");
    const RunConfig b = parse_config(minimal, "a.yaml", {"model.hidden_size=128", "train.steps=200"});
    const auto found = differences(a, b, "model");
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].key, "model.hidden_size");
    EXPECT_EQ(found[0].theirs, "64");
    EXPECT_EQ(found[0].ours, "128");
    EXPECT_EQ(differences(a, b, "").size(), 2u);
}

TEST(Config, DocumentationIsUpToDate) {
    const std::string path = FENWICK_SOURCE_DIR "/docs/configuration.md";
    if (std::getenv("FENWICK_UPDATE_DOCS") != nullptr) write_file_atomically(path, configuration_markdown());
    EXPECT_EQ(read_file(path), configuration_markdown()) << "run FENWICK_UPDATE_DOCS=1 build/tests/train_test";
}

}  // namespace
}  // namespace fenwick::train
