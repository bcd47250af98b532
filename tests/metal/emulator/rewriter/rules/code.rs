//! Rules about code in functions, and about declarations outside them.

use super::super::BUILT_INS;
use super::super::outline::{Declaration, Function, Outline};
use super::super::tokens::{Kind, Token, closing, closing_angle, spaced, split_at_commas};
use super::Finding;

const ADDRESS_SPACES: [&str; 4] = ["device", "constant", "threadgroup", "thread"];

/// Features of C++ that the kernels' language lacks.
const NOT_IN_THE_LANGUAGE: [&str; 16] = [
    "asm",
    "catch",
    "char16_t",
    "char32_t",
    "delete",
    "double",
    "dynamic_cast",
    "goto",
    "new",
    "register",
    "thread_local",
    "throw",
    "try",
    "typeid",
    "virtual",
    "wchar_t",
];

/// In addition to those of built-in parameters.
const ATTRIBUTES: [&str; 6] = [
    "buffer",
    "function_constant",
    "host_name",
    "kernel",
    "max_total_threads_per_threadgroup",
    "threadgroup",
];

/// The text after `#pragma`, without numbers.
const PRAGMAS: [&str; 6] = [
    "unroll",
    "unroll()",
    "clang loop unroll(full)",
    "clang loop unroll(disable)",
    "clang loop unroll_count()",
    "METAL internals : enable",
];

/// Of function constants.
const MAX_INDEX: u32 = 65_535;

fn each_token<'a>(outline: &Outline<'a>, is_wrong: impl Fn(&Token<'a>) -> bool) -> Vec<Finding> {
    let wrong = outline.code.iter().filter(|token| is_wrong(token));
    wrong.map(|token| Finding::at(token, &*token.text)).collect()
}

pub(super) fn known_attributes(outline: &Outline<'_>) -> Vec<Finding> {
    let is_known = |name: &str| ATTRIBUTES.contains(&name) || BUILT_INS.contains(&name);
    let wrong = outline.attributes.iter().filter(|attribute| !is_known(&attribute.name));
    wrong.map(|attribute| Finding::at(&attribute.location, &*attribute.name)).collect()
}

pub(super) fn words(outline: &Outline<'_>) -> Vec<Finding> {
    each_token(outline, |token| token.is_any(&NOT_IN_THE_LANGUAGE))
}

pub(super) fn long_long(outline: &Outline<'_>) -> Vec<Finding> {
    let twice = outline.code.windows(2).filter(|pair| pair.iter().all(|token| token.is("long")));
    twice.map(|pair| Finding::at(&pair[0], spaced(pair))).collect()
}

pub(super) fn literals(outline: &Outline<'_>) -> Vec<Finding> {
    let is_wrong = |text: &str| {
        let text = text.to_ascii_lowercase();
        let (digits, suffixes): (&str, &[&str]) = if let Some(digits) = text.strip_prefix("0x") {
            (digits.trim_start_matches(|c: char| c.is_ascii_hexdigit() || c == '\''), &["u", "l", "ul", "lu"])
        } else {
            let suffix = text.trim_start_matches(|c: char| !c.is_ascii_alphabetic());
            match suffix.strip_prefix('e') {
                Some(exponent) => {
                    (exponent.trim_start_matches(|c: char| !c.is_ascii_alphabetic()), &["f", "h"])
                }
                None if text.contains('.') => (suffix, &["f", "h"]),
                None => (suffix, &["u", "l", "ul", "lu", "h"]),
            }
        };
        !digits.is_empty() && !suffixes.contains(&digits)
    };
    each_token(outline, |token| token.kind == Kind::Number && is_wrong(&token.text))
}

pub(super) fn texts(outline: &Outline<'_>) -> Vec<Finding> {
    let code = &outline.code;
    let is_text = |token: &Token<'_>| token.kind == Kind::Quoted && token.text.starts_with('"');
    // The message of an assertion is one.
    let is_message = |index: usize| {
        let assertion = code[..index].iter().rposition(|token| token.is("static_assert"));
        assertion.is_some_and(|at| closing(code, at + 1).is_ok_and(|end| index < end))
    };
    let wrong = (0..code.len()).filter(|index| is_text(&code[*index]) && !is_message(*index));
    wrong.map(|index| Finding::at(&code[index], &*code[index].text)).collect()
}

pub(super) fn names_of_others(outline: &Outline<'_>) -> Vec<Finding> {
    let is_wrong = |text: &str| {
        let after = text.strip_prefix('_').and_then(|rest| rest.chars().next());
        after.is_some_and(|next| next == '_' || next.is_ascii_uppercase())
            || text.to_ascii_lowercase().starts_with("msl_")
    };
    each_token(outline, |token| token.kind == Kind::Word && is_wrong(&token.text))
}

pub(super) fn pragmas(outline: &Outline<'_>) -> Vec<Finding> {
    let is_known = |text: &str| {
        let words: Vec<&str> = text.split_whitespace().collect();
        let text: String = words.join(" ").chars().filter(|c| !c.is_ascii_digit()).collect();
        PRAGMAS.contains(&text.trim())
    };
    let pragmas = outline.directives.iter();
    let pragmas = pragmas.filter_map(|token| Some((token, token.text.strip_prefix("#pragma")?)));
    pragmas.filter(|(_, text)| !is_known(text)).map(|(token, text)| Finding::at(token, text.trim())).collect()
}

pub(super) fn lambdas(outline: &Outline<'_>) -> Vec<Finding> {
    let follows_none = |before: &Token<'_>| {
        before.kind == Kind::Punctuation && !before.is_any(&[")", "]", ">"]) || before.is("return")
    };
    let wrong = outline.code.windows(2).filter(|pair| pair[1].is("[") && follows_none(&pair[0]));
    wrong.map(|pair| Finding::at(&pair[1], spaced(pair))).collect()
}

pub(super) fn function_pointers(outline: &Outline<'_>) -> Vec<Finding> {
    let is_pointer = |six: &&[Token<'_>]| {
        let follows_a_type = six[0].kind == Kind::Word || six[0].is(">");
        follows_a_type
            && six[1].is("(")
            && six[2].is("*")
            && six[3].kind == Kind::Word
            && six[4].is(")")
            && six[5].is("(")
    };
    let wrong = outline.code.windows(6).filter(is_pointer);
    wrong.map(|six| Finding::at(&six[3], spaced(six))).collect()
}

/// The parts of a body that begin where statements begin, with the tokens up to the next one.
fn statements<'t, 'a>(body: &'t [Token<'a>]) -> impl Iterator<Item = &'t [Token<'a>]> {
    let begins = |index: usize| match index.checked_sub(1).map(|before| &body[before]) {
        None => true,
        Some(before) if before.is("(") => index > 1 && body[index - 2].is("for"),
        Some(before) => before.is_any(&["{", "}", ";"]),
    };
    (0..body.len()).filter(move |index| begins(*index)).map(|index| &body[index..])
}

/// Up to the semicolon.
fn until_end<'t, 'a>(statement: &'t [Token<'a>]) -> &'t [Token<'a>] {
    let end = statement.iter().position(|token| token.is(";")).unwrap_or(statement.len());
    &statement[..end]
}

/// The length of a type's name with its qualifiers and arguments; 0 if none begins here.
fn type_len(tokens: &[Token<'_>]) -> usize {
    const NO_TYPE: [&str; 6] = ["return", "case", "else", "do", "sizeof", "operator"];
    let mut index = 0;
    while let Some(token) = tokens.get(index) {
        if token.kind == Kind::Word && !token.is_any(&NO_TYPE) || token.is("::") {
            index += 1;
        } else if index > 0 && token.is("<") {
            let Ok(end) = closing_angle(tokens, index) else { return 0 };
            index = end + 1;
        } else {
            break;
        }
    }
    index
}

/// Whether a pointer or reference without address space is declared here, and is followed by one of `ends`.
fn is_without_space(tokens: &[Token<'_>], has_name: bool, ends: &[&str]) -> bool {
    let kind = type_len(tokens);
    let stars = tokens[kind..].iter().take_while(|token| token.is_any(&["*", "&", "const"])).count();
    let mut end = kind + stars;
    if has_name {
        let is_name = tokens.get(end).is_some_and(|name| name.kind == Kind::Word);
        end += 1;
        if !is_name {
            return false;
        }
    }
    let is_declaration = kind > 0 && stars > 0 && tokens.get(end).is_none_or(|token| token.is_any(ends));
    is_declaration && !tokens[..kind].iter().any(|token| token.is_any(&ADDRESS_SPACES))
}

pub(super) fn address_spaces(outline: &Outline<'_>) -> Vec<Finding> {
    const AFTER_A_NAME: [&str; 5] = ["=", ";", ",", "[", ":"];
    let mut wrong: Vec<&[Token<'_>]> = Vec::new();
    for parameter in outline.functions.iter().flat_map(|function| &function.parameters) {
        let code = &parameter.code;
        let star = code.iter().position(|token| token.is_any(&["*", "&"]));
        if star.is_some_and(|star| !code[..star].iter().any(|token| token.is_any(&ADDRESS_SPACES))) {
            wrong.push(code);
        }
    }
    let members = outline.structures.iter().flat_map(|structure| &structure.members);
    let declared = members.chain(&outline.variables).map(|declaration| &*declaration.code);
    let in_bodies = outline.functions.iter().flat_map(|function| statements(&function.body));
    wrong.extend(declared.chain(in_bodies).filter(|code| is_without_space(code, true, &AFTER_A_NAME)));
    let code = &outline.code;
    for (index, token) in code.iter().enumerate() {
        let end = match &*token.text {
            "(" => ")",
            "<" => ">",
            _ => continue,
        };
        let inside = &code[index + 1..];
        if is_without_space(inside, false, &[end]) {
            wrong.push(inside);
        }
    }
    let text = |code: &[Token<'_>]| spaced(&code[..code.len().min(6)]);
    wrong.into_iter().map(|code| Finding::at(&code[0], text(until_end(code)))).collect()
}

pub(super) fn threadgroup_memory_of_kernels(outline: &Outline<'_>) -> Vec<Finding> {
    let of_function = |function: &Function<'_>| {
        let declared = statements(&function.body).map(until_end).filter(|statement| {
            let name = statement.iter().position(|token| token.is_any(&["*", "&", "=", "["]));
            let is_pointer = name.is_some_and(|name| statement[name].is_any(&["*", "&"]));
            statement.first().is_some_and(|first| first.is("threadgroup")) && !is_pointer
        });
        let is_wrong = |statement: &&[Token<'_>]| {
            !function.is_kernel || statement.iter().any(|token| token.is_any(&["=", "{"]))
        };
        let wrong = declared.filter(is_wrong).map(|code| Finding::at(&code[0], spaced(code)));
        wrong.collect::<Vec<_>>()
    };
    outline.functions.iter().flat_map(of_function).collect()
}

pub(super) fn function_constants(outline: &Outline<'_>) -> Vec<Finding> {
    let mut known = Vec::new();
    let mut wrong = Vec::new();
    for Declaration { code, attributes } in &outline.variables {
        let attribute = attributes.iter().find(|attribute| attribute.name == "function_constant");
        let Some(attribute) = attribute else { continue };
        let index = attribute.argument.parse::<u32>().ok().filter(|index| *index <= MAX_INDEX);
        let is_declared =
            matches!(&code[..], [space, kind, _] if space.is("constant") && kind.is_any(&["bool", "ushort"]));
        if !is_declared || index.is_none() || known.contains(&index) {
            let text = format!("{} [[function_constant({})]]", spaced(code), attribute.argument);
            wrong.push(Finding::at(&code[0], text));
        }
        known.push(index);
    }
    wrong
}

pub(super) fn constants_with_values(outline: &Outline<'_>) -> Vec<Finding> {
    let is_wrong = |Declaration { code, attributes }: &&Declaration<'_>| {
        let has_value = code.iter().any(|token| token.is_any(&["=", "{"]))
            || attributes.iter().any(|attribute| attribute.name == "function_constant");
        !code.is_empty() && (!has_value || !code.iter().any(|token| token.is("constant")))
    };
    let wrong = outline.variables.iter().filter(is_wrong);
    wrong.map(|variable| Finding::at(&variable.code[0], spaced(&variable.code))).collect()
}

pub(super) fn static_constants(outline: &Outline<'_>) -> Vec<Finding> {
    let members = outline.structures.iter().flat_map(|structure| &structure.members);
    let members = members.map(|member| &*member.code);
    let in_bodies = outline.functions.iter().flat_map(|function| statements(&function.body)).map(until_end);
    let has = |code: &[Token<'_>], word: &str| code.iter().take(4).any(|token| token.is(word));
    let wrong = members.chain(in_bodies).filter(|code| has(code, "static") && !has(code, "constant"));
    wrong.map(|code| Finding::at(&code[0], spaced(code))).collect()
}

/// The functions that a function may call, by name and number of arguments.
fn callees(outline: &Outline<'_>, caller: &Function<'_>) -> Vec<usize> {
    let body = &caller.body;
    let mut found = Vec::new();
    for (index, name) in body.iter().enumerate().filter(|(_, token)| token.kind == Kind::Word) {
        let mut open = index + 1;
        if body.get(open).is_some_and(|next| next.is("<")) {
            open = closing_angle(body, open).map_or(open, |end| end + 1);
        }
        if !body.get(open).is_some_and(|next| next.is("(")) {
            continue;
        }
        let Ok(end) = closing(body, open) else { continue };
        let arguments = split_at_commas(&body[open + 1..end]);
        let num_arguments = arguments.iter().filter(|argument| !argument.is_empty()).count();
        let of = match index.checked_sub(2).map(|of| (&body[of], &body[index - 1])) {
            Some((of, colons)) if colons.is("::") => Some(&*of.text),
            _ => None,
        };
        let is_structure = |name: &str| outline.structures.iter().any(|structure| structure.name == name);
        found.extend(outline.functions.iter().enumerate().filter_map(|(number, function)| {
            let has_value = |parameter: &&Declaration<'_>| parameter.code.iter().any(|token| token.is("="));
            let num_parameters = function.parameters.len();
            let num_needed = num_parameters - function.parameters.iter().filter(has_value).count();
            // A structure that is an argument of a template may be any.
            let is_there = match of {
                Some(of) if is_structure(of) => function.structure == of,
                Some(_) => true,
                None => function.structure.is_empty() || function.structure == caller.structure,
            };
            let takes = (num_needed..=num_parameters).contains(&num_arguments);
            (name.is(&function.name.text) && is_there && takes).then_some(number)
        }));
    }
    found
}

pub(super) fn recursion(outline: &Outline<'_>) -> Vec<Finding> {
    let callees: Vec<Vec<usize>> =
        outline.functions.iter().map(|function| callees(outline, function)).collect();
    let calls_itself = |first: usize| {
        let (mut waiting, mut seen) = (callees[first].clone(), vec![false; callees.len()]);
        while let Some(next) = waiting.pop() {
            if next == first {
                return true;
            }
            if !std::mem::replace(&mut seen[next], true) {
                waiting.extend(&callees[next]);
            }
        }
        false
    };
    let wrong = (0..callees.len()).filter(|number| calls_itself(*number));
    let names = wrong.map(|number| &outline.functions[number].name);
    names.map(|name| Finding::at(name, &*name.text)).collect()
}
