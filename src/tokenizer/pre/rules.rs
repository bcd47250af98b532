//! The expressions of the pre-tokenizers, from the tokenizers' own files where those are known.
//!
//! Character classes are written with `\x{…}` escapes on purpose: as literal characters some of them are
//! changed by Unicode normalisation in editors, and the expression then splits differently.

/// The splitting of text into pieces.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Rule {
    /// In sequence, each within the pieces of the previous one.
    pub(super) cuts: Vec<Cut>,
    /// The same, after bytes are written as characters.
    pub(super) byte_cuts: Vec<Cut>,
}

/// One way of cutting.
#[derive(Debug, PartialEq)]
pub(super) enum Cut {
    /// The matches of the expression, and the text between them, are pieces.
    At(String),
    /// Matches are split into groups of three characters, counted from their ends.
    Thousands(Digits),
}

/// The characters that count as digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Digits {
    /// Every number.
    Numbers,
    /// Decimal digits, which are only cut between such groups.
    BetweenDecimal,
    /// Decimal digits, and none of them where a letter follows.
    DecimalBeforeNoWord,
}

/// Contractions, in either case: `ſ` counts as an s, as for the tokenizers themselves.
const CONTRACTION: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const DIGITS_1_TO_3: &str = r"\p{N}{1,3}";
const CJK: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
const CJK_AND_HANGUL: &str = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
const ASCII_AND_WORDS: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_\x60{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r"| ?[\p{P}\p{S}]+",
);
const LINES_AND_BLANKS: &str = r"|\s*[\r\n]+|\s+(?!\S)|\s+";
const NOT_PUNCTUATION: &str = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+";

fn at(expressions: impl IntoIterator<Item = impl Into<String>>) -> Rule {
    Rule { cuts: expressions.into_iter().map(|text| Cut::At(text.into())).collect(), byte_cuts: Vec::new() }
}

/// The rule of files without a name.
pub(super) fn unnamed() -> Rule {
    at([r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"])
}

/// GPT-2's words, numbers and punctuation, each with the blank before it.
pub(super) fn gpt2() -> Rule {
    at([GPT2])
}

/// The same, and each digit on its own.
pub(super) fn gpt2_digits() -> Rule {
    at([DIGIT, GPT2])
}

/// Words with the character before them, numbers of up to three digits.
pub(super) fn llama3() -> Rule {
    at([words(DIGITS_1_TO_3)])
}

/// The same with single digits.
pub(super) fn qwen2() -> Rule {
    at([words(DIGIT)])
}

/// Marks belong to words.
pub(super) fn qwen35() -> Rule {
    at([format!(
        r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{DIGIT}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{LINES_AND_BLANKS}"
    )])
}

/// Line ends do not belong to punctuation.
pub(super) fn seed_coder() -> Rule {
    at([format!(
        r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+{LINES_AND_BLANKS}"
    )])
}

/// No contractions.
pub(super) fn ufakzeka() -> Rule {
    at([format!(r"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{DIGIT}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{LINES_AND_BLANKS}")])
}

/// Lines first.
pub(super) fn laguna() -> Rule {
    at([r"[^\n]+|[\n]+".to_owned(), words(DIGIT)])
}

/// Numbers first.
pub(super) fn minicpm5() -> Rule {
    at([DIGITS_1_TO_3.to_owned(), words(r"\p{N}+")])
}

/// Runs of blanks in pieces of powers of two.
pub(super) fn jais2() -> Rule {
    at([format!(
        r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{DIGITS_1_TO_3}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s{{512}}(?!\S)|\s{{256}}(?!\S)|\s{{128}}(?!\S)|\s{{64}}(?!\S)|\s{{32}}(?!\S)|\s{{16}}(?!\S)|\s{{8}}(?!\S)|\s{{4}}(?!\S)|\s{{1,2}}(?!\S)|\s{{1}}"
    )])
}

/// Like Qwen's, with another end of lines.
pub(super) fn bailingmoe() -> Rule {
    at([concat!(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    )])
}

/// Several words with blanks between them are one piece.
pub(super) fn exaone_moe() -> Rule {
    at([format!(
        r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{DIGIT}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    )])
}

/// Words end where a capital letter follows a small one.
pub(super) fn tekken() -> Rule {
    at([cased_words("", DIGIT)])
}

/// The same with contractions, and numbers of up to three digits.
pub(super) fn gpt4o() -> Rule {
    at([cased_words(&format!("{CONTRACTION}?"), DIGITS_1_TO_3)])
}

/// The same after numbers in groups of three from their end.
pub(super) fn tiny_aya() -> Rule {
    let mut rule = gpt4o();
    rule.cuts.insert(0, Cut::Thousands(Digits::DecimalBeforeNoWord));
    rule
}

/// The scripts of East Asia first.
pub(super) fn youtu() -> Rule {
    let scripts = concat!(
        r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+",
        r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}",
        r"\x{FE30}-\x{FE4F}]+",
        r"|[\x{3105}-\x{312F}]+",
        r"|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    );
    at([scripts.to_owned(), cased_words(&format!("{CONTRACTION}?"), DIGIT)])
}

/// Chinese characters apart from cased words.
pub(super) fn kimi_k2() -> Rule {
    let lead = r"[^\r\n\p{L}\p{N}]?";
    let upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]";
    let lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]";
    at([format!(
        r"[\p{{Han}}]+|{lead}{upper}*{lower}+{CONTRACTION}?|{lead}{upper}+{lower}*{CONTRACTION}?|{DIGITS_1_TO_3}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{LINES_AND_BLANKS}"
    )])
}

/// DeepSeek's first: the cased scripts, one by one.
pub(super) fn deepseek_llm() -> Rule {
    at([
        r"[\r\n]".to_owned(),
        format!(r"\s?[{CASED_LETTERS}]+"),
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+".to_owned(),
        r"\s+$".to_owned(),
        CJK_AND_HANGUL.to_owned(),
        r"\p{N}+".to_owned(),
    ])
}

/// Line ends, words, punctuation and digits, each on its own.
pub(super) fn deepseek_coder() -> Rule {
    at([r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_AND_HANGUL, DIGIT])
}

/// Numbers, the scripts of East Asia, then words.
pub(super) fn deepseek_v3() -> Rule {
    at([DIGITS_1_TO_3.to_owned(), CJK.to_owned(), format!(r"{ASCII_AND_WORDS}[\r\n]*{LINES_AND_BLANKS}")])
}

/// The same, but each line end is a piece.
pub(super) fn spark() -> Rule {
    let words = format!(r"{ASCII_AND_WORDS}|[\r\n]|\s+(?!\S)|\s+");
    at([DIGITS_1_TO_3.to_owned(), CJK.to_owned(), words, DIGIT.to_owned()])
}

/// Numbers in groups of three from their end, the scripts of Asia, then words.
pub(super) fn afmoe() -> Rule {
    let scripts = concat!(
        r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}",
        r"\x{2F00}-\x{2FDF}\x{0E00}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}",
        r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+",
    );
    let mut rule = at([scripts.to_owned(), format!(r"{ASCII_AND_WORDS}[\r\n]*{LINES_AND_BLANKS}")]);
    rule.cuts.insert(0, Cut::Thousands(Digits::Numbers));
    rule
}

/// Numbers in groups of three from their end, and everything else unsplit: tokens span words.
pub(super) fn superbpe() -> Rule {
    let mut rule = at([r"\p{N}+"]);
    rule.cuts.push(Cut::Thousands(Digits::BetweenDecimal));
    rule
}

/// BLOOM's: everything but blanks and punctuation.
pub(super) fn bloom() -> Rule {
    at([NOT_PUNCTUATION])
}

/// The same, and each digit on its own.
pub(super) fn viking() -> Rule {
    at([NOT_PUNCTUATION, DIGIT])
}

/// Falcon cuts numbers after its bytes are written as characters, some of which count as numbers.
pub(super) fn falcon() -> Rule {
    let byte_cuts = [r"\p{N}+", "[0-9][0-9][0-9]"].map(|text| Cut::At(text.to_owned()));
    Rule { byte_cuts: byte_cuts.into(), ..at([r"[\p{P}$+<=>^\x60|~]+", GPT2]) }
}

/// Chameleon's names of pictures, then indentation, digits and punctuation, each on its own.
pub(super) fn chameleon() -> Rule {
    at([
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        DIGIT,
        r"[\p{P}$+<=>^\x60|~]",
        GPT2,
    ])
}

/// Everything at once.
pub(super) fn whole() -> Rule {
    Rule::default()
}

fn words(number: &str) -> String {
    format!(
        r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{LINES_AND_BLANKS}"
    )
}

fn cased_words(suffix: &str, number: &str) -> String {
    let lead = r"[^\r\n\p{L}\p{N}]?";
    let upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]";
    let lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]";
    format!(
        r"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{LINES_AND_BLANKS}"
    )
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
