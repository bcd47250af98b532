//! Splits a source into the subjects of the language's rules: functions, variables, structures.
//!
//! This is a separate pass from the rewriting, so that the rules see methods and members too.

use super::tokens::{
    Kind, Token, call_parts, closing, closing_angle, code, is_attribute, split_at_commas, without_attributes,
};

/// First tokens of declarations of neither a variable nor a function.
const NO_VARIABLE: [&str; 8] =
    ["using", "typedef", "static_assert", "struct", "class", "union", "enum", "friend"];

/// `name(argument)` between `[[` and `]]`.
#[derive(Debug)]
pub(super) struct Attribute<'a> {
    pub(super) location: Token<'a>,
    pub(super) name: String,
    pub(super) argument: String,
}

/// Code with the attributes that are in it.
#[derive(Debug)]
pub(super) struct Declaration<'a> {
    pub(super) code: Vec<Token<'a>>,
    pub(super) attributes: Vec<Attribute<'a>>,
}

#[derive(Debug)]
pub(super) struct Function<'a> {
    pub(super) name: Token<'a>,
    /// Of the structure that it is a member of.
    pub(super) structure: String,
    /// The tokens before the name.
    pub(super) head: Vec<Token<'a>>,
    pub(super) parameters: Vec<Declaration<'a>>,
    /// Without attributes; none if the function is only declared.
    pub(super) body: Vec<Token<'a>>,
    pub(super) is_kernel: bool,
}

#[derive(Debug)]
pub(super) struct Structure<'a> {
    pub(super) name: String,
    pub(super) members: Vec<Declaration<'a>>,
}

#[derive(Debug, Default)]
pub(super) struct Outline<'a> {
    pub(super) code: Vec<Token<'a>>,
    pub(super) directives: Vec<Token<'a>>,
    pub(super) attributes: Vec<Attribute<'a>>,
    pub(super) functions: Vec<Function<'a>>,
    /// Those outside of functions and structures.
    pub(super) variables: Vec<Declaration<'a>>,
    pub(super) structures: Vec<Structure<'a>>,
    /// Instances of templates that the host can name.
    pub(super) instances: Vec<Declaration<'a>>,
}

impl<'a> Outline<'a> {
    /// # Errors
    /// The location of a bracket that is not closed.
    pub(super) fn of(tokens: &[Token<'a>]) -> Result<Self, String> {
        let is_directive = |token: &&Token<'a>| token.kind == Kind::Directive;
        let directives = tokens.iter().filter(is_directive).cloned().collect();
        let code = code(tokens);
        let attributes = declaration(&code)?.attributes;
        let mut outline = Self { directives, attributes, ..Self::default() };
        outline.scope(&code, "")?;
        outline.code = without_attributes(&code)?.0;
        Ok(outline)
    }

    pub(super) fn kernels(&self) -> impl Iterator<Item = &Function<'a>> {
        self.functions.iter().filter(|function| function.is_kernel)
    }

    /// Declarations in a namespace, or in a structure with a name.
    fn scope(&mut self, tokens: &[Token<'a>], structure: &str) -> Result<(), String> {
        let (mut begin, mut index) = (0, 0);
        while index < tokens.len() {
            let token = &tokens[index];
            if token.is_any(&["(", "["]) {
                index = closing(tokens, index)?;
            } else if token.is("{") {
                let head = without_template(&tokens[begin..index])?;
                let end = closing(tokens, index)?;
                let inside = &tokens[index + 1..end];
                let first = head.first();
                if first.is_some_and(|first| first.is("namespace")) {
                    self.scope(inside, structure)?;
                    begin = end + 1;
                } else if first.is_some_and(|first| first.is_any(&["struct", "class", "union"])) {
                    let name = head.get(1).map(|name| name.text.to_string()).unwrap_or_default();
                    self.structures.push(Structure { name: name.clone(), members: Vec::new() });
                    self.scope(inside, &name)?;
                } else if let Some(function) = function(head, structure, inside)? {
                    self.functions.push(function);
                    begin = end + 1;
                }
                index = end;
            } else if token.is(";") {
                self.declared(&tokens[begin..index], structure)?;
                begin = index + 1;
            } else if token.is_any(&["public", "private", "protected"])
                && tokens.get(index + 1).is_some_and(|next| next.is(":"))
            {
                index += 1;
                begin = index + 1;
            }
            index += 1;
        }
        Ok(())
    }

    /// Declarations that end with a semicolon.
    fn declared(&mut self, tokens: &[Token<'a>], structure: &str) -> Result<(), String> {
        let is_instance = matches!(tokens, [first, next, ..] if first.is("template") && !next.is("<"));
        let tokens = if is_instance { tokens } else { without_template(tokens)? };
        if is_instance {
            self.instances.push(declaration(tokens)?);
        } else if let Some(function) = function(tokens, structure, &[])? {
            self.functions.push(function);
        } else if tokens.first().is_some_and(|first| !first.is_any(&NO_VARIABLE)) {
            let variable = declaration(tokens)?;
            match self.structures.iter_mut().rev().find(|known| known.name == structure) {
                Some(known) if !structure.is_empty() => known.members.push(variable),
                _ => self.variables.push(variable),
            }
        }
        Ok(())
    }
}

fn declaration<'a>(tokens: &[Token<'a>]) -> Result<Declaration<'a>, String> {
    let mut attributes = Vec::new();
    for index in 0..tokens.len() {
        if is_attribute(tokens, index) {
            let end = closing(tokens, index)?;
            for one in split_at_commas(&tokens[index + 2..end - 1]) {
                let (name, argument) = call_parts(&one);
                attributes.push(Attribute { location: tokens[index].clone(), name, argument });
            }
        }
    }
    Ok(Declaration { code: without_attributes(tokens)?.0, attributes })
}

fn without_template<'t, 'a>(tokens: &'t [Token<'a>]) -> Result<&'t [Token<'a>], String> {
    match tokens {
        [first, open, ..] if first.is("template") && open.is("<") => {
            Ok(&tokens[closing_angle(tokens, 1)? + 1..])
        }
        _ => Ok(tokens),
    }
}

/// A function, if `head` declares one: it has parameters before any initial value.
fn function<'a>(
    head: &[Token<'a>],
    structure: &str,
    body: &[Token<'a>],
) -> Result<Option<Function<'a>>, String> {
    if head.first().is_none_or(|first| first.is_any(&NO_VARIABLE)) {
        return Ok(None);
    }
    let mut index = 0;
    while index < head.len() {
        if is_attribute(head, index) {
            index = closing(head, index)?;
        } else if head[index].is("=") {
            return Ok(None);
        } else if head[index].is("(") {
            let Some(name) = index.checked_sub(1).map(|name| &head[name]) else { return Ok(None) };
            if !name.is_any(&["decltype", "alignas"]) {
                let end = closing(head, index)?;
                let parameters = split_at_commas(&head[index + 1..end]);
                let parameters = parameters.iter().filter(|parameter| !parameter.is_empty());
                let before = declaration(&head[..index - 1])?;
                return Ok(Some(Function {
                    name: name.clone(),
                    structure: structure.to_owned(),
                    parameters: parameters.map(|one| declaration(one)).collect::<Result<_, _>>()?,
                    body: without_attributes(body)?.0,
                    is_kernel: before.attributes.iter().any(|one| one.name == "kernel")
                        || before.code.iter().any(|token| token.is("kernel")),
                    head: before.code,
                }));
            }
            index = closing(head, index)?;
        }
        index += 1;
    }
    Ok(None)
}
