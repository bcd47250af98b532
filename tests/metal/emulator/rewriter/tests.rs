use super::rules::RULES;
use super::tokens::{Kind, tokenize};
use super::{Mode, rewrite};

/// The text between the include and the tables.
fn rewritten(source: &str, mode: Mode) -> String {
    let text = rewrite(source, mode, true).unwrap().text;
    let text = text.strip_prefix("#include \"msl.hpp\"\n").unwrap();
    text.split("\n# 1 \"generated\"").next().unwrap().to_owned()
}

#[test]
fn tokens_are_the_source_again_with_their_places() {
    let source = "# 12 \"a.metal\"\nint x = 1.5e-3h; // no\n#pragma unroll\n\n#line 3 \"b.h\"\nx >>= a->b[\"\\\"\"];\n";
    let tokens = tokenize(source);
    assert_eq!(tokens.iter().map(|token| &*token.text).collect::<String>(), source);
    let location = |text: &str| tokens.iter().find(|token| token.text == text).map(|token| token.location());
    assert_eq!(location("1.5e-3h").unwrap(), "a.metal:12");
    assert_eq!(location(">>=").unwrap(), "b.h:3");
    assert_eq!(tokens.iter().filter(|token| token.kind == Kind::Directive).count(), 3);
}

#[test]
fn literals_have_their_type() {
    let check = |source: &str, expected: &str| {
        let source = format!("constant float x = {source};");
        assert_eq!(rewritten(&source, Mode::Run), format!("constant float x = {expected};"));
    };
    check("1.0", "1.0f");
    check("1.", "1.f");
    check(".5e-3", ".5e-3f");
    check("1e5", "1e5f");
    check("2.0f", "2.0f");
    check("2.5h", "half(2.5f)");
    check("3h", "half(3.0f)");
    check("7", "7");
    check("0x1e5", "0x1e5");
    check("8u", "8u");
    check("a.x", "a.x");
}

#[test]
fn lines_stay_where_they_are() {
    let source = "template <int N>\n[[kernel]]\nvoid f(\n    device float* x [[buffer(1)]],\n\n    uint t [[thread_index_in_threadgroup]])\n{\n    threadgroup float\n        s[N];\n    threadgroup_barrier(\n        mem_flags::mem_threadgroup);\n    s[t] = 0;\n}\ntemplate [[host_name(\"f\" \"_4\")]] [[kernel]]\n    decltype(f<4>) f<4>;\nconstant int last = 1;\n";
    for mode in [Mode::Run, Mode::AddressSpaces] {
        let text = rewritten(source, mode);
        for (index, line) in source.lines().enumerate() {
            if ["s[t] = 0", "constant int last", "uint t"].iter().any(|part| line.contains(part)) {
                let found = text.lines().nth(index).unwrap();
                assert_eq!(found.replace(" [[thread_index_in_threadgroup]]", ""), found);
                assert!(found.contains(line.split(" [[").next().unwrap().trim_end()), "{mode:?}: {text}");
            }
        }
    }
    let result = rewrite(source, Mode::Run, true).unwrap();
    assert!(
        result.text.contains("{\"f_4\", msl_enter<decltype(&f < 4 >), &f < 4 >>, msl_parameters_0}"),
        "{}",
        result.text
    );
    assert_eq!((result.barriers.len(), result.barriers[0].line), (1, 10));
}

#[test]
fn constants_are_set_at_run_time() {
    let source = "constant bool wide [[function_constant(3)]];\nconstant int columns = wide ? 4 : 1;\n\
                  constant int twice = 2 * columns;\nconstant int other = 5;\n";
    let text = rewritten(source, Mode::Run);
    assert!(text.contains("MSL_FUNCTION_CONSTANT(bool, wide, 3);\n"), "{text}");
    assert!(text.contains("MSL_DERIVED_CONSTANT(int, columns, (wide ? 4 : 1));\n"), "{text}");
    assert!(text.contains("MSL_DERIVED_CONSTANT(int, twice, (2 * columns));\n"), "{text}");
    assert!(text.contains("constant int other = 5;\n"), "{text}");
}

#[test]
fn what_is_not_understood_is_an_error_with_its_place() {
    let check = |source: &str, expected: &str| {
        let message = rewrite(&format!("#line 5 \"k.metal\"\n{source}"), Mode::Run, true).unwrap_err();
        assert!(message.contains(expected), "{message}");
    };
    check("void f( {", "k.metal:5");
    check("template [[kernel]] decltype(f<1>) f<1>;", "k.metal:5: an instance is");
    check(
        "[[kernel]] void f(device float* x [[buffer(N)]]) {}",
        "f: a binding is a number: device float * x",
    );
    check("template [[host_name(\"x\")]] [[kernel]] decltype(g<1>) g<1>;", "x: there is no kernel g");
}

/// Each defect is found by its own rule only, and similar correct code is not.
#[test]
fn each_rule_finds_its_defect() {
    for rule in &RULES {
        let message = rewrite(&format!("#line 5 \"k.metal\"\n{}", rule.defect), Mode::Run, true).unwrap_err();
        let is_found = message.starts_with("k.metal:") && message.contains(rule.demand);
        assert!(is_found && message.lines().count() == 1, "{}: {message}", rule.demand);
        let right = rewrite(rule.right, Mode::Run, true).map(drop);
        assert_eq!(right, Ok(()), "{}", rule.demand);
    }
}
