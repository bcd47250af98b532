//! Tokens of texts of every kind against the `tokenizers` library, from the GGUF file and from `tokenizer.json`.

use tinyvllm::tokenizer::{SpecialTokens, Tokenizer};
use tinyvllm::weights::Checkpoint;

use super::{Random, convert, gguf};

/// Texts to cut chunks from.
const LONG: [&str; 4] = [
    include_str!("../fixtures/smollm2/text.txt"),
    include_str!("tokens.rs"),
    include_str!("../../README.md"),
    include_str!("../../scripts/smollm2_reference.py"),
];

/// What texts are put together from: characters, or parts with a meaning of their own.
const ALPHABETS: [&[&str]; 8] = [
    &[
        "0", "1", "2", "3", "7", "9", ".", ",", "-", "+", "e", "E", " ", "x", "$", "%", "/", ":", "½", "²",
        "①", "Ⅷ", "٣", "६", "𝟘",
    ],
    &[
        " ", "  ", "\t", "\n", "\r\n", "\u{a0}", "\u{3000}", "\u{2028}", "\u{200b}", "\u{b}", "\u{c}",
        "\u{85}", "a", "1", "é",
    ],
    &["😀", "👍🏽", "👩‍👩‍👧‍👦", "🇩🇪", "❤️", "🏳️‍🌈", "☃", " ", "a", "b"],
    &[
        "日本語",
        "カタ",
        "ひら",
        "中文",
        "测试",
        "한국어",
        "시험",
        "。",
        "、",
        "「",
        "」",
        "！",
        " ",
        "x",
        "1",
    ],
    &["á", "ñ", "ç", "ß", "Æ", "Ж", "д", "ع", "ر", "ת", "ไทย", "हि", "ελ", "e\u{301}", " ", "'s", "'S", "s"],
    &["https://", "a", "b9", "-", "_", ".", "~", "/", "?", "=", "&", "%20", "#", "@", ":", "+"],
    &[
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<repo_name>",
        "<|im_st",
        "art|>",
        "|>",
        " ",
        "\n",
        "hi",
        "1",
        "don't",
    ],
    &[
        "I'll",
        "WE'VE",
        "it's",
        "DON'T",
        "'d",
        "'m",
        "'re",
        "’s",
        " ",
        "\n",
        "(",
        ")",
        "{",
        "}",
        "\"",
        "_",
        "snake_case",
        "camelCase",
    ],
];

fn texts() -> Vec<String> {
    let mut random = Random(5);
    let mut texts =
        vec!["a".repeat(2_000), " ".repeat(300) + "x", "1".repeat(200), "\n".repeat(100), "é".repeat(50)];
    for len in [5, 20, 80, 300, 1_000].into_iter().cycle().take(700) {
        let long: Vec<char> = random.choice(&LONG).chars().collect();
        let start = random.below(long.len());
        texts.push(long[start..].iter().take(len).collect());
    }
    for alphabet in ALPHABETS.into_iter().cycle().take(1_200) {
        let len = 1 + random.below(30);
        texts.push((0..len).map(|_| random.choice(alphabet)).collect());
    }
    // Any character, control characters among them.
    let ranges = [0..32, 32..127, 0xa0..0x3000, 0x3000..0xd800, 0xe000..0x11_0000];
    for _ in 0..300 {
        let len = 1 + random.below(30);
        let mut any = || {
            let range = &ranges[random.below(ranges.len())];
            char::from_u32(range.start + random.below(range.len()) as u32).unwrap()
        };
        texts.push((0..len).map(|_| any()).collect());
    }
    // Each of the 256 bytes is in one of these.
    texts.extend((0..0x3000).step_by(61).filter_map(char::from_u32).map(|char| format!("x{char}{char}1")));
    texts.extend((0..0x100).filter_map(char::from_u32).map(|char| format!("{char}a {char}")));
    texts
}

#[test]
fn tokens_are_those_of_the_library_of_the_publisher() {
    let Some(gguf) = gguf() else { return };
    let checkpoint = Checkpoint::open(&gguf).unwrap();
    let metadata = checkpoint.gguf_metadata().unwrap();
    let json = convert::tokenizer(metadata).to_string();
    let mut reference = tokenizers::Tokenizer::from_bytes(&json).unwrap();
    let ours = [
        ("GGUF", Tokenizer::from_gguf(metadata).unwrap()),
        ("tokenizer.json", Tokenizer::from_json(json.as_bytes()).unwrap()),
    ];
    let texts = texts();
    assert!(texts.len() > 2_000);
    let (mut num_tokens, mut num_special, mut num_lossy) = (0, 0, 0);
    for (special, are_text) in [(SpecialTokens::Parse, false), (SpecialTokens::AsText, true)] {
        reference.set_encode_special_tokens(are_text);
        for text in &texts {
            let encoding = reference.encode_fast(text.as_str(), false).unwrap();
            let wanted = encoding.get_ids();
            let wanted_text = reference.decode(wanted, false).unwrap();
            for (source, tokenizer) in &ours {
                let found = tokenizer.encode(text, special).unwrap();
                assert_eq!(found, wanted, "{source}, {special:?}: {text:?}");
                assert_eq!(tokenizer.decode(&found, false), wanted_text, "{source}, {special:?}: {text:?}");
            }
            num_tokens += wanted.len();
            num_special += wanted.iter().filter(|id| ours[0].1.is_special(**id)).count();
            num_lossy += usize::from(wanted_text != *text);
        }
    }
    // There were special tokens, and bytes without a token, which both drop.
    assert!(num_tokens > 100_000 && num_special > 100, "{num_tokens} tokens, {num_special} special ones");
    assert!(num_lossy > 50, "{num_lossy} texts with bytes that have no token");
}
