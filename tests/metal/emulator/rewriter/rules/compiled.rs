//! Rules about what Apple's compiler makes of loops, matrices, conditions and structures. It accepts what breaks them,
//! with a warning, another meaning or slow code.

use std::collections::BTreeSet;

use super::super::outline::Outline;
use super::super::tokens::{Kind, Token, closing, spaced};
use super::Finding;

/// Functions that all threads of a simdgroup or threadgroup execute together. A loop with one gets no remainder, so it
/// is only unrolled if the number of turns is known.
fn is_collective(token: &Token<'_>) -> bool {
    token.kind == Kind::Word
        && (token.text.starts_with("simd_")
            || token.text.starts_with("simdgroup_") && !token.text.starts_with("simdgroup_matrix")
            || token.is("threadgroup_barrier"))
}

/// Names that are first known when a pipeline is made: function constants, and constants that are computed from them.
fn late_constants(outline: &Outline<'_>) -> BTreeSet<String> {
    let mut late = BTreeSet::new();
    for variable in &outline.variables {
        let has_attribute = variable.attributes.iter().any(|one| one.name == "function_constant");
        let end = variable.code.iter().position(|token| token.is("=")).unwrap_or(variable.code.len());
        let uses_one = variable.code[end..].iter().any(|token| late.contains(&*token.text));
        if let Some(name) = end.checked_sub(1).filter(|_| has_attribute || uses_one) {
            late.insert(variable.code[name].text.to_string());
        }
    }
    late
}

/// Functions that are collective, or call one that is.
fn collective_functions<'o>(outline: &'o Outline<'_>) -> BTreeSet<&'o str> {
    let mut found = BTreeSet::new();
    loop {
        let calls_one = |token: &Token<'_>| is_collective(token) || found.contains(&*token.text);
        let more: Vec<&str> = (outline.functions.iter())
            .filter(|function| function.body.iter().any(calls_one))
            .map(|function| &*function.name.text)
            .filter(|name| !found.contains(name))
            .collect();
        if more.is_empty() {
            return found;
        }
        found.extend(more);
    }
}

/// A loop with a pragma that unrolls it.
struct Unrolled<'o, 'a> {
    is_full: bool,
    variable: &'o str,
    condition: &'o [Token<'a>],
    body: std::ops::Range<usize>,
}

fn unrolled_loops<'o, 'a>(outline: &'o Outline<'a>) -> Vec<Unrolled<'o, 'a>> {
    let code = &outline.code;
    let after = |pragma: &Token<'a>| {
        code.iter().position(|token| token.file == pragma.file && token.line > pragma.line)
    };
    let unrolled = |pragma: &Token<'a>| {
        let text = pragma.text.strip_prefix("#pragma")?;
        let unrolls = text.contains("unroll") && !text.contains("disable");
        let begin = after(pragma).filter(|begin| unrolls && code[*begin].is("for"))?;
        let end = closing(code, begin + 1).ok()?;
        let header = &code[begin + 2..end];
        let mut parts = header.split(|token| token.is(";"));
        let (first, condition) = (parts.next()?, parts.next()?);
        let name = first.iter().position(|token| token.is("="))?.checked_sub(1)?;
        let body_end = match code.get(end + 1)?.is("{") {
            true => closing(code, end + 1).ok()?,
            false => end + code[end..].iter().position(|token| token.is(";"))?,
        };
        let is_full = !text.contains("count");
        Some(Unrolled { is_full, variable: &first[name].text, condition, body: end + 1..body_end + 1 })
    };
    outline.directives.iter().filter_map(unrolled).collect()
}

pub(super) fn bounds_of_unrolled_loops(outline: &Outline<'_>) -> Vec<Finding> {
    let (late, collective) = (late_constants(outline), collective_functions(outline));
    let is_wrong = |one: &&Unrolled<'_, '_>| {
        let calls_one = |token: &Token<'_>| is_collective(token) || collective.contains(&*token.text);
        one.condition.iter().any(|token| late.contains(&*token.text))
            && (one.is_full || outline.code[one.body.clone()].iter().any(calls_one))
    };
    let loops = unrolled_loops(outline);
    let wrong = loops.iter().filter(is_wrong);
    wrong.map(|one| Finding::at(&one.condition[0], spaced(one.condition))).collect()
}

/// Whether this is known in each turn of the unrolled loops around it: numbers, constants, and the loops' variables.
fn is_known_index(
    index: &[Token<'_>],
    at: usize,
    loops: &[Unrolled<'_, '_>],
    late: &BTreeSet<String>,
) -> bool {
    let counts_a_loop =
        |text: &str| loops.iter().any(|one| one.is_full && one.variable == text && one.body.contains(&at));
    let is_constant = |text: &str| text.chars().all(|c| !c.is_lowercase()) && !late.contains(text);
    let words = index.iter().filter(|token| token.kind == Kind::Word);
    let mut words = words.map(|token| &*token.text);
    words.all(|text| is_constant(text) || counts_a_loop(text))
}

pub(super) fn elements_of_matrices(outline: &Outline<'_>) -> Vec<Finding> {
    let (code, loops, late) = (&outline.code, unrolled_loops(outline), late_constants(outline));
    let mut wrong = Vec::new();
    for at in (0..code.len()).filter(|at| code[*at].is("thread_elements")) {
        let open = at + 3;
        let index = code.get(open).filter(|token| token.is("[")).and_then(|_| closing(code, open).ok());
        if !index.is_some_and(|end| is_known_index(&code[open + 1..end], at, &loops, &late)) {
            wrong.push(Finding::at(&code[at], spaced(&code[at..(open + 3).min(code.len())])));
        }
    }
    wrong
}

pub(super) fn arrays_of_matrices(outline: &Outline<'_>) -> Vec<Finding> {
    let (loops, late) = (unrolled_loops(outline), late_constants(outline));
    let is_declared = |code: &[Token<'_>], at: usize| {
        let before = code[..at].iter().rposition(|token| token.is_any(&[";", "{", "}", "(", ","]));
        let kind = &code[before.map_or(0, |before| before + 1)..at];
        // The comma may be one of the matrix's own arguments.
        kind.first().is_some_and(|first| {
            first.text.starts_with("simdgroup_float") || first.text.starts_with("simdgroup_half")
        }) || at > 3
            && code[at - 1].is(">")
            && code[..at].iter().rev().take(10).any(|token| token.is("simdgroup_matrix"))
    };
    let code = &outline.code;
    let opens =
        |at: &usize| code[*at].kind == Kind::Word && code.get(at + 1).is_some_and(|next| next.is("["));
    let declared: BTreeSet<&str> =
        (0..code.len()).filter(opens).filter(|at| is_declared(code, *at)).map(|at| &*code[at].text).collect();
    let mut wrong = Vec::new();
    for at in (0..code.len()).filter(opens).filter(|at| declared.contains(&*code[*at].text)) {
        let Ok(end) = closing(code, at + 1) else { continue };
        if !is_declared(code, at) && !is_known_index(&code[at + 2..end], at, &loops, &late) {
            wrong.push(Finding::at(&code[at], spaced(&code[at..=end])));
        }
    }
    wrong
}

pub(super) fn arms_of_conditions(outline: &Outline<'_>) -> Vec<Finding> {
    let code = &outline.code;
    let constants: BTreeSet<&str> = (outline.variables.iter())
        .filter_map(|variable| {
            let end = variable.code.iter().position(|token| token.is_any(&["=", "["]))?;
            end.checked_sub(1).map(|name| &*variable.code[name].text)
        })
        .collect();
    let mut wrong = Vec::new();
    for at in (1..code.len().saturating_sub(1)).filter(|at| constants.contains(&*code[*at].text)) {
        let is_first = code[at - 1].is("?") && code[at + 1].is(":");
        let follows_first = code[at - 1].is(":") && code[at + 1].is_any(&[";", ",", ")", "]", "}"]);
        if is_first || follows_first {
            wrong.push(Finding::at(&code[at], spaced(&code[at - 1..=at])));
        }
    }
    wrong
}

pub(super) fn bases_without_data(outline: &Outline<'_>) -> Vec<Finding> {
    let code = &outline.code;
    let mut wrong = Vec::new();
    for at in (0..code.len().saturating_sub(3)).filter(|at| code[*at].is("struct")) {
        let Some(open) = code[at..].iter().position(|token| token.is_any(&["{", ";", ")"])) else { continue };
        let head = &code[at..at + open];
        let Some(colon) = head.iter().position(|token| token.is(":")) else { continue };
        let has_data = |name: &Token<'_>| {
            let base = outline.structures.iter().find(|structure| name.is(&structure.name));
            base.is_some_and(|base| {
                let mut members = base.members.iter().filter(|member| !member.code.is_empty());
                members.any(|member| !member.code.iter().take(3).any(|token| token.is("static")))
            })
        };
        if head[colon..].iter().any(has_data) {
            wrong.push(Finding::at(&head[0], spaced(head)));
        }
    }
    wrong
}
