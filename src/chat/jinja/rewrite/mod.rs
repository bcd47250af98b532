//! Rewrites a chat template to source for the template engine: statements are unchanged, expressions become calls of
//! our filters, whitespace control is applied, lines keep their numbers.
//!
//! Invariant: the nesting of the result is bounded so that reading and compiling it needs little stack.

mod calls;
mod expression;

use std::collections::HashSet;
use std::fmt::Write as _;

use self::expression::{Parser, quote};
use super::lexer::{Segment, SegmentKind, Token, TokenKind, lex};

/// Blocks inside of blocks; a branch of a condition counts too.
const MAX_BLOCKS: usize = 100;

/// Looks at the clock at the beginning of a macro. The statement's own end follows.
const LOOK: &str = " %}{% if 0|py_look %}{% endif";
/// Where a template is not written as one, and how.
#[derive(Debug)]
pub(in crate::chat) struct SyntaxError {
    pub(in crate::chat) line: usize,
    pub(in crate::chat) message: String,
}

type Result<T> = std::result::Result<T, SyntaxError>;

/// A template in the engine's words.
#[derive(Debug)]
pub(in crate::chat) struct Rewritten {
    pub(in crate::chat) source: String,
    /// The variables that expressions read, set by the template or not.
    pub(in crate::chat) names: HashSet<String>,
}

/// Rewrites a template.
pub(in crate::chat) fn rewrite(source: &str) -> Result<Rewritten> {
    let segments = lex(source)?;
    let mut rewriter = Rewriter {
        macros: open_macros(&segments),
        output: String::with_capacity(source.len() * 2),
        line: 1,
        names: HashSet::new(),
        sets: Vec::new(),
        num_sets: 0,
        blocks: Vec::new(),
        num_names: num_names_in_macros(&segments).into_iter(),
    };
    for segment in &segments {
        rewriter.segment(segment)?;
    }
    Ok(Rewritten { source: rewriter.output, names: rewriter.names })
}

/// The names of all macros, if some macro takes arguments that it does not name.
fn open_macros(segments: &[Segment]) -> HashSet<String> {
    let mut macros = HashSet::new();
    let mut are_open = false;
    for segment in segments {
        let (SegmentKind::Print(tokens) | SegmentKind::Block(tokens)) = &segment.kind else { continue };
        are_open |= tokens.iter().any(
            |token| matches!(&token.kind, TokenKind::Name(name) if name == "varargs" || name == "kwargs"),
        );
        if let (
            SegmentKind::Block(_),
            [Token { kind: TokenKind::Name(tag), .. }, Token { kind: TokenKind::Name(name), .. }, ..],
        ) = (&segment.kind, &tokens[..])
            && tag == "macro"
        {
            macros.insert(name.clone());
        }
    }
    if are_open { macros } else { HashSet::new() }
}

/// How many names there are between the beginning and the end of each macro and each call.
fn num_names_in_macros(segments: &[Segment]) -> Vec<usize> {
    let (mut counts, mut open, mut num_names) = (Vec::new(), Vec::new(), 0);
    for segment in segments {
        let (SegmentKind::Print(tokens) | SegmentKind::Block(tokens)) = &segment.kind else { continue };
        let tag = match (&segment.kind, tokens.first().map(|token| &token.kind)) {
            (SegmentKind::Block(_), Some(TokenKind::Name(tag))) => tag.as_str(),
            _ => "",
        };
        match tag {
            "macro" | "call" => {
                open.push((counts.len(), num_names));
                counts.push(0);
            }
            "endmacro" | "endcall" => {
                if let Some((index, before)) = open.pop() {
                    counts[index] = num_names - before;
                }
            }
            _ => {}
        }
        num_names += tokens.iter().filter(|token| matches!(token.kind, TokenKind::Name(_))).count();
    }
    counts
}

/// A macro or a call of this many names, at its cost.
fn defined(num_names: Option<usize>, definition: &str) -> String {
    format!("if {}|py_macro %}}{{% endif %}}{{% {definition}{LOOK}", num_names.unwrap_or(0))
}

struct Rewriter {
    macros: HashSet<String>,
    output: String,
    /// The line that the output is in.
    line: usize,
    names: HashSet<String>,
    /// Blocks whose text is being set: the namespace and attribute, where it is one.
    sets: Vec<Option<(String, String, String)>>,
    num_sets: usize,
    /// How many blocks each open one counts for.
    blocks: Vec<usize>,
    /// The number of names in the remaining macros, including those of calls.
    num_names: std::vec::IntoIter<usize>,
}

impl Rewriter {
    fn segment(&mut self, segment: &Segment) -> Result<()> {
        let text = match &segment.kind {
            SegmentKind::Data(text) => format!("{} }}}}", quote(text)),
            SegmentKind::Print(tokens) => {
                let mut parser = Parser::new(tokens, segment.line, &mut self.names, &self.macros);
                let value = parser.tuple(true, &[])?;
                parser.end()?;
                format!("{value} }}}}")
            }
            SegmentKind::Block(tokens) => self.statement(tokens, segment.line)?,
        };
        let is_block = matches!(segment.kind, SegmentKind::Block(_));
        self.output.push_str(if is_block { "{% " } else { "{{ " });
        // New lines are white space here.
        for _ in self.line..segment.line {
            self.output.push('\n');
        }
        self.line = self.line.max(segment.line);
        self.output.push_str(&text);
        Ok(())
    }

    fn check_depth(&self, line: usize) -> Result<()> {
        if self.blocks.iter().sum::<usize>() > MAX_BLOCKS {
            return Err(SyntaxError {
                line,
                message: format!("blocks are nested more than {MAX_BLOCKS} deep"),
            });
        }
        Ok(())
    }

    fn statement(&mut self, tokens: &[Token], line: usize) -> Result<String> {
        let error = |message: String| SyntaxError { line, message };
        let Some((Token { kind: TokenKind::Name(tag), .. }, arguments)) = tokens.split_first() else {
            return Err(error("a tag name is missing".to_owned()));
        };
        match tag.as_str() {
            "for" | "if" | "macro" | "call" | "filter" | "with" | "autoescape" | "block" | "generation" => {
                self.blocks.push(1);
                self.check_depth(line)?;
            }
            // The engine reads a branch inside of the one before.
            "elif" => {
                self.blocks.last_mut().into_iter().for_each(|block| *block += 1);
                self.check_depth(line)?;
            }
            "endfor" | "endif" | "endmacro" | "endcall" | "endfilter" | "endwith" | "endautoescape"
            | "endblock" | "endgeneration" => {
                self.blocks.pop();
            }
            _ => {}
        }
        let mut parser = Parser::new(arguments, line, &mut self.names, &self.macros);
        let mut text = match tag.as_str() {
            "for" => {
                let target = parser.targets()?;
                parser.expect_name("in")?;
                let iterable = parser.tuple(false, &["recursive"])?;
                let condition = if parser.skip_name("if") {
                    format!(" if {}", parser.expression()?)
                } else {
                    String::new()
                };
                let recursive = if parser.skip_name("recursive") { " recursive" } else { "" };
                let items = if target.contains(',') { "py_rows" } else { "py_iter" };
                format!("for {target} in {iterable}|{items}{condition}{recursive}")
            }
            "if" | "elif" => format!("{tag} {}", parser.tuple(false, &[])?),
            "else" | "endif" | "endfor" | "endmacro" | "endcall" | "endfilter" | "endwith"
            | "endautoescape" | "break" | "continue" => tag.clone(),
            "generation" => "with".to_owned(),
            "endgeneration" => "endwith".to_owned(),
            "set" => {
                let target = parser.set_target()?;
                if parser.skip_op("=") {
                    let value = parser.tuple(true, &[])?;
                    match target {
                        (Some((namespace, name)), _) => {
                            format!("do py_set({namespace}, {}, {value})", quote(&name))
                        }
                        (None, target) if target.contains(',') => format!("set {target} = {value}|py_star"),
                        (None, target) => format!("set {target} = {value}"),
                    }
                } else {
                    self.num_sets += 1;
                    let filters = parser.filter_chain(String::new())?;
                    let separator = if filters.is_empty() { "" } else { " | " };
                    if self.sets.len() >= MAX_BLOCKS {
                        return Err(error(format!("blocks are nested more than {MAX_BLOCKS} deep")));
                    }
                    let (entry, name) = match target {
                        (Some((namespace, attribute)), _) => {
                            let variable = format!("py_block_{}", self.num_sets);
                            (Some((namespace, attribute, variable.clone())), variable)
                        }
                        (None, target) => (None, target),
                    };
                    self.sets.push(entry);
                    format!("set {name}{separator}{filters}")
                }
            }
            "endset" => match self.sets.pop().flatten() {
                Some((namespace, attribute, variable)) => {
                    format!("endset %}}{{% do py_set({namespace}, {}, {variable})", quote(&attribute))
                }
                None => "endset".to_owned(),
            },
            "macro" => {
                let name = parser.name("the name of a macro")?;
                let (mut signature, late) = parser.signature()?;
                if !self.macros.is_empty() {
                    for (name, empty) in [("varargs", "[]|py_tuple"), ("kwargs", "[]|py_dict")] {
                        let separator = if signature.is_empty() { "" } else { ", " };
                        let written = write!(signature, "{separator}{name}={empty}");
                        debug_assert!(written.is_ok(), "writing to a string does not fail");
                    }
                }
                let mut text = defined(self.num_names.next(), &format!("macro {name}({signature})"));
                for (name, default) in late {
                    let is_missing = format!("{name}|py_test(\"undefined\")");
                    text += &format!(" %}}{{% if {is_missing} %}}{{% set {name} = {default} %}}{{% endif");
                }
                text
            }
            "call" => {
                let signature =
                    if parser.is_op("(") { format!("({})", parser.signature()?.0) } else { String::new() };
                let call = format!("call{signature} {}", parser.plain_call()?);
                defined(self.num_names.next(), &call)
            }
            "filter" => format!("filter {}", parser.filter_chain_without_pipe()?),
            "with" => {
                let (mut targets, mut values) = (Vec::new(), Vec::new());
                while !parser.is_at_end() {
                    if !targets.is_empty() {
                        parser.expect_op(",")?;
                    }
                    targets.push(parser.target()?);
                    parser.expect_op("=")?;
                    values.push(parser.expression()?.to_string());
                }
                match &targets[..] {
                    [] => "with".to_owned(),
                    [target] => format!("with {target} = {}", values.concat()),
                    // No value sees the other variables.
                    _ => format!("with ({}) = [{}]", targets.join(", "), values.join(", ")),
                }
            }
            "autoescape" => format!("autoescape {}", parser.expression()?),
            "block" | "endblock" => {
                let mut words = tag.clone();
                while !parser.is_at_end() {
                    words.push(' ');
                    words += &parser.name("the name of a block")?;
                }
                words
            }
            // A statement that writes.
            "print" => {
                let mut text = "if true %}".to_owned();
                loop {
                    text += &format!("{{{{ {} }}}}", parser.expression()?);
                    if !parser.skip_op(",") {
                        break;
                    }
                }
                text + "{% endif"
            }
            "include" | "import" | "from" | "extends" => {
                // Chat templates are single files: this template includes another one.
                parser.skip_all();
                let message = format!("{{% {tag} %}} is not supported: a chat template is a single file");
                format!("do py_fail({})", quote(&message))
            }
            other => return Err(error(format!("unknown tag {other:?}"))),
        };
        parser.end()?;
        text.push_str(" %}");
        Ok(text)
    }
}
