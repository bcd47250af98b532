//! Compares pieces with the reference library's, given the expressions of its files.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::punctuation::Punctuation;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, PreTokenizerWrapper,
    SplitDelimiterBehavior,
};

use crate::tokenizer::allowance::Allowance;
use crate::tokenizer::byte_level;
use crate::tokenizer::pipeline::cut;
use crate::tokenizer::pre::PreTokenizer;

/// Texts for each expression.
const NUM_TEXTS: u32 = 2_000;

/// A step of a file.
enum Step {
    Split(&'static str),
    Digits,
    DigitRuns,
    Punctuation,
    PunctuationRuns,
    /// With its own expression.
    Gpt2,
    Bytes,
}
use Step::{Bytes, DigitRuns, Gpt2, Punctuation as EachSign, PunctuationRuns, Split as At};

const WORDS_1_TO_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const WORDS_1: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const CASED: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const BLOOM: &str = r" ?[^(\s|[.,!?…。，、।۔،])]+";
const CJK: &str = r"[一-龥\u3040-ゟ゠-ヿ]+";
const DEEPSEEK_WORDS: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// A name of each rule with the file's steps that it replaces.
const REFERENCES: &[(&str, &[Step])] = &[
    ("gpt-2", &[Gpt2]),
    ("smollm", &[Step::Digits, Gpt2]),
    ("llama-bpe", &[At(WORDS_1_TO_3), Bytes]),
    ("qwen2", &[At(WORDS_1), Bytes]),
    (
        "qwen35",
        &[
            At(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
            Bytes,
        ],
    ),
    (
        "seed-coder",
        &[
            At(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
            Bytes,
        ],
    ),
    (
        "ufakzeka",
        &[At(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), Bytes],
    ),
    ("laguna", &[At(r"[^\n]+|[\n]+"), At(WORDS_1), Bytes]),
    (
        "minicpm5",
        &[
            At(r"\p{N}{1,3}"),
            At(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
            Bytes,
        ],
    ),
    (
        "jais-2",
        &[
            At(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
            ),
            Bytes,
        ],
    ),
    (
        "bailingmoe",
        &[
            At(
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            ),
            Bytes,
        ],
    ),
    (
        "exaone-moe",
        &[
            At(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            ),
            Bytes,
        ],
    ),
    (
        "tekken",
        &[
            At(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
            Bytes,
        ],
    ),
    ("gpt-4o", &[At(CASED), Bytes]),
    ("tiny_aya", &[At(r"\d{1,3}(?=(?:\d{3})*\b)"), At(CASED), Bytes]),
    (
        "youtu",
        &[
            At(r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+"),
            At(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
            Bytes,
        ],
    ),
    (
        "kimi-k2",
        &[
            At(
                r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
            Bytes,
        ],
    ),
    (
        "deepseek-coder",
        &[
            At(r"[\r\n]"),
            At(r"\s?\p{L}+"),
            At(r"\s?\p{P}+"),
            At(r"[一-龥ࠀ-一가-\ud7ff]+"),
            Step::Digits,
            Bytes,
        ],
    ),
    ("deepseek-v3", &[At(r"\p{N}{1,3}"), At(CJK), At(DEEPSEEK_WORDS), Bytes]),
    (
        "spark2_5",
        &[
            At(r"\p{N}{1,3}"),
            At(CJK),
            At(
                r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##,
            ),
            At(r"\p{N}"),
            Bytes,
        ],
    ),
    (
        "afmoe",
        &[
            At(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|\z))"),
            At(
                r"[一-鿿㐀-䶿\uf900-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿ\ua9e0-\ua9ff\u0e00-\u0e3f가-\ud7afᄀ-ᇿ]+",
            ),
            At(DEEPSEEK_WORDS),
            Bytes,
        ],
    ),
    ("superbpe", &[At(r"\p{N}+"), At(r"(?=(\d{3})+(?!\d))"), Bytes]),
    ("bloom", &[At(BLOOM), Bytes]),
    ("viking", &[At(BLOOM), Step::Digits, Bytes]),
    ("falcon", &[PunctuationRuns, Gpt2, DigitRuns, At("[0-9][0-9][0-9]")]),
    (
        "chameleon",
        &[
            At("<sentinel:[0-9]+>"),
            At("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
            At(r"([\t\n]|    |  )"),
            Step::Digits,
            EachSign,
            Gpt2,
        ],
    ),
    (
        "default",
        &[
            At(r"[\p{P}\$\+<=>\^~\|]+"),
            At(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
            At(r"\p{N}+"),
            At("[0-9][0-9][0-9]"),
            Bytes,
        ],
    ),
];

fn reference(steps: &[Step]) -> PreTokenizerWrapper {
    let split = |pattern: &str| {
        Split::new(SplitPattern::Regex(pattern.to_owned()), SplitDelimiterBehavior::Isolated, false).unwrap()
    };
    let steps = steps.iter().map(|step| match step {
        At(pattern) => split(pattern).into(),
        Step::Digits => Digits::new(true).into(),
        DigitRuns => Digits::new(false).into(),
        EachSign => Punctuation::new(SplitDelimiterBehavior::Isolated).into(),
        PunctuationRuns => Punctuation::new(SplitDelimiterBehavior::Contiguous).into(),
        Gpt2 => ByteLevel::new(false, false, true).into(),
        Bytes => ByteLevel::new(false, false, false).into(),
    });
    PreTokenizerWrapper::Sequence(Sequence::new(steps.collect()))
}

fn text() -> impl Strategy<Value = String> {
    let word = prop::sample::select(vec![
        "Hello",
        "iPhone",
        "HTTPServer",
        "I'll",
        "DON'T",
        "we'Ve",
        "'re",
        "'S",
        "'ſx",
        "été",
        "naïve",
        "ǅ",
        "ß",
        "ﬁ",
        "İ",
        "мир",
        "你好",
        "世界",
        "こんにちは",
        "カタカナ",
        "ｶﾅ",
        "한국어",
        "ㄱㄴ",
        "ㄅㄆ",
        "ภาษา",
        "हिन्दी",
        "ខ្មែរ",
        "العربية",
        "e\u{301}",
        "\u{301}",
        "１２",
        "½",
        "²",
        "①",
        "٣٤٥٦",
        "१२३",
        "𝟘𝟙",
        "1",
        "12",
        "123",
        "1234567",
        "3.14",
        "1,000",
        "_",
        "__x",
        "foo_bar",
        "x=1;",
        "//",
        "/",
        "\\n",
        "“x”",
        "…",
        "—",
        "。",
        "，",
        "、",
        "।",
        "(",
        ")",
        "|",
        "$+<=>^`~",
        "#!",
        "[]{}",
        "<sentinel:12>",
        "IMGIMGABZ",
        "IMGIMGZ",
        "🦙",
        "👨‍👩‍👧",
        "🇩🇪",
        "\u{200b}",
        "\u{feff}",
        "\u{200d}",
        "\u{7f}",
        "\u{1}",
        "K",
        "ª",
        "ᴬ",
    ]);
    let blank = prop::sample::select(vec![
        " ", "  ", "   ", "    ", "       ", "\n", "\n\n", "\r\n", "\r", "\t", "\n ", " \n", "\u{a0}",
        "\u{3000}", "\u{85}", "\u{b}", "\u{2028}", "\u{1680}",
    ]);
    let part = prop_oneof![
        4 => word.prop_map(str::to_owned),
        3 => blank.prop_map(str::to_owned),
        1 => any::<char>().prop_map(String::from),
        1 => prop::char::range(' ', '~').prop_map(String::from),
    ];
    prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
}

fn pieces(pre: &PreTokenizer, text: &str) -> Vec<String> {
    let pieces =
        cut(text, &pre.splits, &mut Allowance::of(text)).unwrap().into_iter().map(byte_level::encode_text);
    pieces
        .flat_map(|piece| {
            cut(&piece, &pre.byte_splits, &mut Allowance::of(&piece))
                .unwrap()
                .into_iter()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn pieces_equal_those_of_the_library() {
    let config = Config { cases: NUM_TEXTS, failure_persistence: None, ..Config::default() };
    for (name, steps) in REFERENCES {
        let (ours, theirs) = (PreTokenizer::from_name(name).unwrap(), reference(steps));
        let mut runner =
            TestRunner::new_with_rng(config.clone(), TestRng::deterministic_rng(RngAlgorithm::ChaCha));
        let result = runner.run(&text(), |text| {
            let mut expected = PreTokenizedString::from(text.as_str());
            theirs.pre_tokenize(&mut expected).unwrap();
            let expected = expected.get_splits(OffsetReferential::Normalized, OffsetType::None);
            let expected: Vec<_> = expected.into_iter().map(|(piece, ..)| piece.to_owned()).collect();
            prop_assert_eq!(pieces(&ours, &text), expected);
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}
