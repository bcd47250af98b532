//! How kernels are declared.

use super::super::outline::{Attribute, Declaration, Function, Outline};
use super::super::tokens::{Token, spaced};
use super::super::{BUILT_INS, NUM_POSITIONS};
use super::Finding;

/// Metal has 31 buffer slots.
const MAX_NUMBER: u32 = 30;
const MAX_THREADS: u32 = 1024;

/// A parameter with the one attribute that it has.
struct Bound<'t, 'a> {
    parameter: &'t Declaration<'a>,
    attribute: &'t Attribute<'a>,
}

fn bound<'t, 'a>(kernel: &'t Function<'a>) -> impl Iterator<Item = Bound<'t, 'a>> {
    kernel.parameters.iter().filter_map(|parameter| match &parameter.attributes[..] {
        [attribute] => Some(Bound { parameter, attribute }),
        _ => None,
    })
}

impl Bound<'_, '_> {
    fn is_position(&self) -> bool {
        BUILT_INS[..NUM_POSITIONS].contains(&&*self.attribute.name)
    }

    fn is_binding(&self) -> bool {
        matches!(&*self.attribute.name, "buffer" | "threadgroup")
    }

    /// The type, without `const`.
    fn kind(&self) -> String {
        let (_, kind) = self.parameter.code.split_last().unwrap_or((&self.parameter.code[0], &[]));
        let kind: Vec<Token<'_>> = kind.iter().filter(|token| !token.is("const")).cloned().collect();
        spaced(&kind)
    }

    /// How many values a `uint` or `ushort` or a vector of them has.
    fn num_components(&self) -> Option<u32> {
        let kind = self.kind();
        let digits = kind.strip_prefix("uint").or_else(|| kind.strip_prefix("ushort"))?;
        match digits {
            "" => Some(1),
            "2" => Some(2),
            "3" => Some(3),
            _ => None,
        }
    }

    fn text(&self) -> String {
        format!("{} [[{}]]", spaced(&self.parameter.code), self.attribute.name)
    }

    fn finding(&self) -> Finding {
        Finding::at(&self.attribute.location, self.text())
    }
}

fn each(outline: &Outline<'_>, is_wrong: impl Fn(&Bound<'_, '_>) -> bool) -> Vec<Finding> {
    let all = outline.kernels().flat_map(bound);
    all.filter(|one| is_wrong(one)).map(|one| one.finding()).collect()
}

pub(super) fn positions_alike(outline: &Outline<'_>) -> Vec<Finding> {
    let of_kernel = |kernel| {
        let positions: Vec<_> = bound(kernel).filter(Bound::is_position).collect();
        let first = positions.first()?;
        let other = positions.iter().find(|one| one.num_components() != first.num_components())?;
        Some(Finding::at(&other.attribute.location, format!("{} next to {}", first.text(), other.text())))
    };
    outline.kernels().filter_map(of_kernel).collect()
}

pub(super) fn types_of_positions(outline: &Outline<'_>) -> Vec<Finding> {
    each(outline, |one| one.is_position() && one.num_components().is_none())
}

pub(super) fn types_of_indices(outline: &Outline<'_>) -> Vec<Finding> {
    let indices = &BUILT_INS[NUM_POSITIONS..];
    each(outline, |one| indices.contains(&&*one.attribute.name) && one.num_components() != Some(1))
}

pub(super) fn one_attribute(outline: &Outline<'_>) -> Vec<Finding> {
    let parameters = outline.kernels().flat_map(|kernel| &kernel.parameters);
    let wrong = parameters.filter(|parameter| parameter.attributes.len() != 1);
    wrong.map(|parameter| Finding::at(&parameter.code[0], spaced(&parameter.code))).collect()
}

pub(super) fn numbers_in_range(outline: &Outline<'_>) -> Vec<Finding> {
    let is_wrong = |argument: &str| argument.parse::<u32>().is_ok_and(|number| number > MAX_NUMBER);
    each(outline, |one| one.is_binding() && is_wrong(&one.attribute.argument))
}

pub(super) fn numbers_differ(outline: &Outline<'_>) -> Vec<Finding> {
    let of_kernel = |kernel| {
        let bindings: Vec<_> = bound(kernel).filter(Bound::is_binding).collect();
        let key = |one: &Bound<'_, '_>| (one.attribute.name.clone(), one.attribute.argument.clone());
        let again = |index: &usize| bindings[..*index].iter().any(|one| key(one) == key(&bindings[*index]));
        let wrong: Vec<_> =
            (0..bindings.len()).filter(again).map(|index| bindings[index].finding()).collect();
        wrong
    };
    outline.kernels().flat_map(of_kernel).collect()
}

pub(super) fn spaces_of_bindings(outline: &Outline<'_>) -> Vec<Finding> {
    each(outline, |one| {
        let code = &one.parameter.code;
        let is_pointer = code.iter().any(|token| token.is_any(&["*", "&"]));
        let spaces: &[&str] = match &*one.attribute.name {
            "buffer" => &["device", "constant"],
            "threadgroup" => &["threadgroup"],
            _ => return false,
        };
        !is_pointer || !code.iter().any(|token| token.is_any(spaces))
    })
}

/// The first member with another offset, including those of nested structures.
fn other_member<'t, 'a>(outline: &'t Outline<'a>, name: &str) -> Option<&'t Declaration<'a>> {
    let structure = outline.structures.iter().find(|structure| structure.name == name)?;
    structure.members.iter().find_map(|member| match member.code.first() {
        Some(kind) if kind.is_any(&["int", "uint", "float"]) => None,
        Some(kind) if outline.structures.iter().any(|inner| kind.is(&inner.name)) && !kind.is(name) => {
            other_member(outline, &kind.text)
        }
        Some(first) if first.is("static") => None,
        _ => Some(member),
    })
}

pub(super) fn structures_as_the_host_has_them(outline: &Outline<'_>) -> Vec<Finding> {
    let is_constant =
        |one: &Bound<'_, '_>| one.is_binding() && one.parameter.code.iter().any(|token| token.is("constant"));
    let constants = outline.kernels().flat_map(bound).filter(is_constant);
    let wrong = constants.filter_map(|one| {
        let mut words = one.parameter.code.iter();
        let member = words.find_map(|word| other_member(outline, &word.text))?;
        Some(Finding::at(&member.code[0], format!("{} in {}", spaced(&member.code), one.text())))
    });
    wrong.collect()
}

pub(super) fn returns_void(outline: &Outline<'_>) -> Vec<Finding> {
    let wrong = outline.kernels().filter(|kernel| !kernel.head.iter().any(|token| token.is("void")));
    wrong.map(|kernel| Finding::at(&kernel.name, &*kernel.name.text)).collect()
}

pub(super) fn not_called(outline: &Outline<'_>) -> Vec<Finding> {
    let kernels: Vec<&str> = outline.kernels().map(|kernel| &*kernel.name.text).collect();
    // A name after another scope, or without a list of arguments, is a different name.
    let is_call = |three: &&[Token<'_>]| {
        three[1].is_any(&kernels) && three[2].is_any(&["(", "<"]) && !three[0].is("::")
    };
    let bodies = outline.functions.iter().flat_map(|function| function.body.windows(3));
    bodies.filter(is_call).map(|three| Finding::at(&three[1], &*three[1].text)).collect()
}

pub(super) fn names_differ(outline: &Outline<'_>) -> Vec<Finding> {
    let mut known: Vec<&str> = Vec::new();
    let mut wrong = Vec::new();
    for attribute in outline.attributes.iter().filter(|attribute| attribute.name == "host_name") {
        if known.contains(&&*attribute.argument) {
            wrong.push(Finding::at(&attribute.location, &*attribute.argument));
        }
        known.push(&attribute.argument);
    }
    wrong
}

pub(super) fn threads_in_range(outline: &Outline<'_>) -> Vec<Finding> {
    let limits = outline.attributes.iter().filter(|one| one.name == "max_total_threads_per_threadgroup");
    let is_wrong =
        |argument: &str| argument.parse().is_ok_and(|number: u32| number > MAX_THREADS || number == 0);
    let wrong = limits.filter(|one| is_wrong(&one.argument));
    wrong.map(|one| Finding::at(&one.location, &*one.argument)).collect()
}
