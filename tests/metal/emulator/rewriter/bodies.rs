//! Rewrites functions and initialisers.

use super::tokens::{
    Kind, Token, closing, closing_angle, code, is_attribute, newlines, spaced, split_at_commas,
};
use super::{Barrier, Mode, Rewriter};

impl Rewriter {
    /// Literals get their type, statement attributes are removed, arrays in threadgroup memory become references to
    /// memory of the run time, and barriers get their number.
    pub(super) fn body<'a>(&mut self, tokens: &[Token<'a>]) -> Result<Vec<Token<'a>>, String> {
        let mut out: Vec<Token<'a>> = Vec::with_capacity(tokens.len());
        let mut index = 0;
        // Whether the next token begins a statement.
        let mut begins = true;
        while index < tokens.len() {
            let token = &tokens[index];
            if begins && token.is("threadgroup") {
                let end = (index..tokens.len()).find(|&i| tokens[i].is(";"));
                let end = end.ok_or_else(|| format!("{}: a declaration without end", token.location()))?;
                if let Some(text) = self.threadgroup_variable(&tokens[index + 1..end])? {
                    out.push(token.raw(text));
                    out.extend(newlines(&tokens[index..end]));
                    index = end + 1;
                    continue;
                }
            }
            if is_attribute(tokens, index) {
                index = closing(tokens, index)? + 1;
                continue;
            }
            if self.mode == Mode::AddressSpaces {
                let rewritten = match &*token.text {
                    "?" => self.condition(tokens, index)?,
                    _ => constructor(tokens, index),
                };
                if let Some((rewritten, end)) = rewritten {
                    out.extend(rewritten);
                    index = end;
                    begins = false;
                    continue;
                }
            }
            if token.is_any(&["threadgroup_barrier", "simdgroup_barrier"]) && self.mode != Mode::AddressSpaces
            {
                let open = (index + 1..tokens.len()).find(|&i| !tokens[i].is_blank());
                let open = open.ok_or_else(|| format!("{}: a barrier without argument", token.location()))?;
                let end = closing(tokens, open)?;
                out.extend_from_slice(&tokens[index..end]);
                out.push(token.raw(format!(", {}", self.barriers.len())));
                self.barriers.push(Barrier {
                    call: spaced(&tokens[index..=end]),
                    file: token.file.to_owned(),
                    line: token.line,
                });
                index = end;
                continue;
            }
            out.push(literal(token));
            if !token.is_blank() {
                begins = token.is_any(&["{", "}", ";"]);
            }
            index += 1;
        }
        Ok(out)
    }

    /// `? a : b` with a check of the address spaces of both; and where it ends.
    fn condition<'a>(&mut self, tokens: &[Token<'a>], mark: usize) -> Result<Rewritten<'a>, String> {
        let (mut nested, mut colon, mut end) = (0_usize, None, mark + 1);
        while let Some(token) = tokens.get(end) {
            match &*token.text {
                "(" | "[" | "{" => end = closing(tokens, end)?,
                "<" => end = arguments_of_template(tokens, end).unwrap_or(end),
                "?" => nested += 1,
                ":" if nested > 0 => nested -= 1,
                ":" if colon.is_none() => colon = Some(end),
                "," | ";" | ")" | "]" | "}" | ":" => break,
                _ => {}
            }
            end += 1;
        }
        let Some(colon) = colon else {
            return Err(format!("{}: a condition without `:`", tokens[mark].location()));
        };
        let (first, second) = (self.body(&tokens[mark + 1..colon])?, self.body(&tokens[colon + 1..end])?);
        // On one line, so that later lines stay where they are.
        let on_a_line = |arm: &[Token<'_>]| -> String {
            arm.iter().map(|token| if token.is_blank() { " " } else { &*token.text }).collect()
        };
        let spaces = [&first, &second].map(|arm| format!("decltype(msl_space({}))", on_a_line(arm)));
        let mut out = vec![tokens[mark].raw(format!("? (msl_alike<{}>(),", spaces.join(", ")))];
        out.extend(first);
        out.push(tokens[colon].raw(") :"));
        out.extend(second);
        Ok(Some((out, end)))
    }

    /// The declaration after `threadgroup` at the start of a statement; none if it declares a pointer or a reference.
    fn threadgroup_variable<'a>(&mut self, declaration: &[Token<'a>]) -> Result<Option<String>, String> {
        let mut parts = split_at_commas(&code(declaration)).into_iter();
        let first = parts.next().unwrap_or_default();
        let (mut brackets, mut angles) = (0_usize, 0_usize);
        for token in &first {
            match &*token.text {
                "(" | "[" | "{" => brackets += 1,
                ")" | "]" | "}" => brackets = brackets.saturating_sub(1),
                "<" => angles += 1,
                ">" => angles = angles.saturating_sub(1),
                "*" | "&" if brackets == 0 && angles == 0 => return Ok(None),
                _ => {}
            }
        }
        let name = first.iter().position(|token| token.is("[")).unwrap_or(first.len());
        let Some(name) = name.checked_sub(1).filter(|name| *name > 0) else { return Ok(None) };
        let element = spaced(&first[..name]);
        let mut text = String::new();
        for declarator in std::iter::once(first[name..].to_vec()).chain(parts) {
            let Some(name) = declarator.first() else { continue };
            let (name, extents) = (&name.text, spaced(&declarator[1..]));
            let site = self.num_threadgroup_variables;
            self.num_threadgroup_variables += 1;
            text += &format!(
                "threadgroup {element} (&{name}) {extents} = *(threadgroup {element} (*) {extents}) \
                 msl_threadgroup_variable({site}, sizeof({element} {extents}), alignof({element})); "
            );
        }
        Ok(Some(text))
    }
}

/// In the kernels' language `1.0` is a float and `1.0h` a half.
fn literal<'a>(token: &Token<'a>) -> Token<'a> {
    let text = &*token.text;
    if token.kind != Kind::Number || text.starts_with("0x") || text.starts_with("0X") {
        return token.clone();
    }
    let number = text.trim_end_matches(['h', 'H']);
    let is_floating = number.contains(['.', 'e', 'E']);
    if number.len() < text.len() {
        let point = if is_floating { "" } else { ".0" };
        token.raw(format!("half({number}{point}f)"))
    } else if is_floating && text.ends_with(|last: char| last.is_ascii_digit() || last == '.') {
        token.raw(format!("{text}f"))
    } else {
        token.clone()
    }
}

/// Tokens instead of others, and the index after those.
type Rewritten<'a> = Option<(Vec<Token<'a>>, usize)>;

/// `float4(` as `msl_vector<float4>(`, because clang's own vectors have no constructors.
fn constructor<'a>(tokens: &[Token<'a>], name: usize) -> Rewritten<'a> {
    let token = &tokens[name];
    let end = match &*token.text {
        "vec" => arguments_of_template(tokens, name + 1)? + 1,
        _ if is_vector(token) => name + 1,
        _ => return None,
    };
    let open = next_code(tokens, end)?;
    // `float4 (&name)[2]` declares one.
    let first = next_code(tokens, open + 1)?;
    let is_declared = tokens[first].is_any(&["&", "*"])
        && next_code(tokens, closing(tokens, open).ok()? + 1).is_some_and(|after| tokens[after].is("["));
    (tokens[open].is("(") && !is_declared)
        .then(|| (vec![token.raw(format!("msl_vector<{}>", spaced(&tokens[name..end])))], end))
}

fn is_vector(token: &Token<'_>) -> bool {
    const SCALARS: [&str; 11] =
        ["bfloat", "char", "float", "half", "int", "long", "short", "uchar", "uint", "ulong", "ushort"];
    let scalar = token.text.strip_suffix(['2', '3', '4']);
    token.kind == Kind::Word && scalar.is_some_and(|scalar| SCALARS.contains(&scalar))
}

/// The next token that is neither space nor newline.
fn next_code(tokens: &[Token<'_>], from: usize) -> Option<usize> {
    (from..tokens.len()).find(|&index| !tokens[index].is_blank())
}

/// The `>` of the template arguments that begin at `open`; none if it is a comparison.
fn arguments_of_template(tokens: &[Token<'_>], open: usize) -> Option<usize> {
    let is_open = tokens.get(open)?.is("<");
    let end = is_open.then(|| closing_angle(tokens, open).ok()).flatten()?;
    let after = next_code(tokens, end + 1)?;
    let is_expression = tokens[open..end].iter().any(|token| token.is_any(&["?", ":", ";", "&&", "||"]));
    (!is_expression && tokens[after].is_any(&["(", "::", "{"])).then_some(end)
}
