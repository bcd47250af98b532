//! The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`.
//!
//! Character classes are written with `\x{…}` escapes on purpose: as literal characters some of them are
//! changed by Unicode normalisation in editors, and the expression then splits differently.

use super::split::SplitRegex;
use crate::{Error, Result};

/// How one `pre` splits text, and what else follows from its name.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    /// Applied one after the other, each inside the pieces left by the one before.
    pub(super) splits: Vec<SplitRegex>,
    /// A piece that is a token is taken whole, without going through the merges.
    pub(super) ignore_merges: bool,
    /// Whether a beginning-of-sequence token is added when the file does not say.
    pub(super) add_bos: bool,
}

const KNOWN: &str = "llama-bpe, llama3, llama-v3, glm4, chatglm-bpe, qwen2, deepseek-r1-qwen, deepseek-llm, \
    deepseek-coder, deepseek-v3, youtu, tekken";

impl PreTokenizer {
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] for a name that is not in the list.
    pub(super) fn from_name(name: &str) -> Result<Self> {
        let (patterns, ignore_merges, add_bos) = match name {
            "llama-bpe" | "llama3" | "llama-v3" => (vec![words(r"\p{N}{1,3}")], true, true),
            "glm4" => (vec![words(r"\p{N}{1,3}")], true, false),
            "chatglm-bpe" => (vec![words(r"\p{N}{1,3}")], false, false),
            "qwen2" | "deepseek-r1-qwen" => (vec![words(r"\p{N}")], false, false),
            "deepseek-llm" => (deepseek_llm(), false, false),
            "deepseek-coder" => (deepseek_coder(), false, false),
            "deepseek-v3" => (deepseek_v3(), false, false),
            "youtu" => (vec![YOUTU_SCRIPTS.to_owned(), cased_words(&format!("{CONTRACTION}?"))], true, false),
            "tekken" => (vec![cased_words("")], true, true),
            _ => {
                return Err(Error::unsupported(format!("the pre-tokenizer {name:?} is not known"))
                    .with_hint(format!("known ones are {KNOWN}")));
            }
        };
        let splits = patterns.iter().map(|pattern| SplitRegex::new(pattern)).collect::<Result<_>>()?;
        Ok(Self { splits, ignore_merges, add_bos })
    }
}

const CONTRACTION: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])";
const CJK: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
const CJK_AND_HANGUL: &str = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
const YOUTU_SCRIPTS: &str = concat!(
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+",
    r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}",
    r"\x{FE30}-\x{FE4F}]+",
    r"|[\x{3105}-\x{312F}]+",
    r"|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
);

fn words(number: &str) -> String {
    format!(
        r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
}

fn cased_words(suffix: &str) -> String {
    let lead = r"[^\r\n\p{L}\p{N}]?";
    let upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]";
    let lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]";
    format!(
        r"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
}

fn deepseek_llm() -> Vec<String> {
    vec![
        r"[\r\n]".to_owned(),
        format!(r"\s?[{CASED_LETTERS}]+"),
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+".to_owned(),
        r"\s+$".to_owned(),
        CJK_AND_HANGUL.to_owned(),
        r"\p{N}+".to_owned(),
    ]
}

fn deepseek_coder() -> Vec<String> {
    [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_AND_HANGUL, r"\p{N}"].map(str::to_owned).to_vec()
}

fn deepseek_v3() -> Vec<String> {
    [
        r"\p{N}{1,3}",
        CJK,
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_\x60{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Letters of the cased scripts, as the inside of a character class.
const CASED_LETTERS: &str = concat!(
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}",
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}",
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}",
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}",
    r"\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}",
    r"\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}",
    r"\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}",
    r"\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}",
    r"\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}",
    r"\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}",
    r"\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}",
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}",
    r"\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}",
    r"\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}",
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn every_listed_name_is_known() {
        for name in KNOWN.split(", ") {
            assert!(PreTokenizer::from_name(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_list() {
        let error = PreTokenizer::from_name("gpt-9").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("\"gpt-9\""), "{error:?}");
        assert!(error.hint().unwrap().contains("qwen2"), "{error:?}");
    }

    #[test]
    fn pieces_of_each_expression() {
        let check = |name: &str, text: &str, expected: &[&str]| {
            let mut pieces = vec![text];
            for split in PreTokenizer::from_name(name).unwrap().splits {
                let mut next = Vec::new();
                pieces.iter().for_each(|piece| split.split(piece, &mut next));
                pieces = next;
            }
            assert_eq!(pieces, expected, "{name}");
        };
        check(
            "llama-bpe",
            "I'll pay 12345\n\n  now",
            &["I", "'ll", " pay", " ", "123", "45", "\n\n", " ", " now"],
        );
        check("qwen2", "x12", &["x", "1", "2"]);
        check("deepseek-coder", "a_1 b\n", &["a", "_", "1", " b", "\n"]);
        check("youtu", "HTTPServer don't", &["HTTPServer", " don't"]);
        check("tekken", "iPhone don't", &["i", "Phone", " don", "'t"]);
    }
}
