use super::*;
use crate::ErrorKind;
use crate::tokenizer::allowance::Allowance;

fn pieces<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
    let mut pieces = vec![text];
    for split in PreTokenizer::from_name(name).unwrap().splits {
        let mut next = Vec::new();
        for piece in &pieces {
            split.split(piece, &mut Allowance::of(text), &mut next).unwrap();
        }
        pieces = next;
    }
    pieces
}

#[test]
fn names_are_known_once_and_their_expressions_are_valid() {
    let mut known: Vec<_> = names().collect();
    known.iter().for_each(|name| assert!(PreTokenizer::from_name(name).is_ok(), "{name}"));
    known.sort_unstable();
    let num_names = known.len();
    known.dedup();
    assert_eq!(known.len(), num_names);
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
    let check =
        |name: &str, text: &str, expected: &[&str]| assert_eq!(pieces(name, text), expected, "{name}");
    check("default", "a,12345  b", &["a", ",", "123", "45", " ", " b"]);
    check("gpt-2", "I'll pay 123  now\n x", &["I", "'ll", " pay", " 123", " ", " now", "\n", " x"]);
    check("smollm", "I pay 12 now", &["I", " pay", " ", "1", "2", " now"]);
    check(
        "llama-bpe",
        "I'LL pay 12345\n\n  now",
        &["I", "'LL", " pay", " ", "123", "45", "\n\n", " ", " now"],
    );
    check("qwen2", "x12'ſa", &["x", "1", "2", "'ſ", "a"]);
    check("qwen35", "xe\u{301} !", &["xe\u{301}", " !"]);
    check("seed-coder", "a!\n\nb", &["a", "!", "\n\n", "b"]);
    check("ufakzeka", "ev'de don't", &["ev", "'de", " don", "'t"]);
    check("laguna", "a!\n\nb", &["a", "!", "\n\n", "b"]);
    check("minicpm5", "x12345", &["x", "123", "45"]);
    check("jais-2", "a          b\n", &["a", "        ", " ", " b", "\n"]);
    check("bailingmoe", "I'Ll\n\n\nx", &["I", "'Ll", "\n\n\n", "x"]);
    check("exaone-moe", "one two  three!\n\nx", &["one two", " ", " three", "!\n", "\n", "x"]);
    check("tekken", "iPhone don't", &["i", "Phone", " don", "'t"]);
    check("gpt-4o", "HTTPServer DON'T12345", &["HTTPServer", " DON'T", "123", "45"]);
    check("tiny_aya", "1234567 1234a", &["1", "234", "567", " ", "123", "4", "a"]);
    check("youtu", "HTTPServer don't 한국", &["HTTPServer", " don't", " ", "한국"]);
    check("kimi-k2", "a漢字b Cd'S12345", &["a", "漢字", "b", " Cd'S", "123", "45"]);
    check("deepseek-llm", "a b 12", &["a", " b", " ", "12"]);
    check("deepseek-coder", "a_1 b\n", &["a", "_", "1", " b", "\n"]);
    check("deepseek-v3", "a.b 1234\n\n", &["a", ".b", " ", "123", "4", "\n\n"]);
    check("spark2_5", "a.\n\nb", &["a", ".", "\n", "\n", "b"]);
    check("afmoe", "a 12345", &["a", " ", "12", "345"]);
    check("superbpe", "by the way 12345678", &["by the way ", "12", "345", "678"]);
    check("bloom", "one, two12", &["one", ",", " two12"]);
    check("viking", "two12", &["two", "1", "2"]);
    check("falcon", "a,b 12", &["a", ",", "b", " 12"]);
    check("chameleon", "IMGIMGABZ\t    !?1", &["IMGIMGABZ", "\t", "    ", "!", "?", "1"]);
}
