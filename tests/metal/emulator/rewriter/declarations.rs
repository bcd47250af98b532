//! Declarations at namespace scope: kernels, their instances, function constants, and all others.

use super::tokens::{
    Token, call_parts, closing, closing_angle, code, is_attribute, newlines, spaced, split_at_commas,
    without_attributes,
};
use super::{BUILT_INS, FunctionConstant, Instance, Parameter, ParameterKind, Rewriter};

impl Rewriter {
    /// Cuts the source into declarations and rewrites each.
    pub(super) fn all<'a>(&mut self, tokens: &[Token<'a>]) -> Result<Vec<Token<'a>>, String> {
        let mut out = Vec::with_capacity(tokens.len());
        let mut begin = 0;
        let mut index = 0;
        while index < tokens.len() {
            let token = &tokens[index];
            let current = &tokens[begin..index];
            if token.is("{") {
                let head = code(current);
                if head.first().is_some_and(|first| first.is("namespace")) {
                    // Declarations in a namespace are at namespace scope as well.
                    out.extend_from_slice(&tokens[begin..=index]);
                    begin = index + 1;
                } else {
                    let is_function = is_function_head(&head)?;
                    index = closing(tokens, index)?;
                    if is_function {
                        out.extend(self.declaration(&tokens[begin..=index])?);
                        begin = index + 1;
                    }
                }
            } else if token.is_any(&["(", "["]) {
                index = closing(tokens, index)?;
            } else if token.is(";") {
                out.extend(self.declaration(&tokens[begin..=index])?);
                begin = index + 1;
            } else if token.is("}") {
                out.extend_from_slice(&tokens[begin..=index]);
                begin = index + 1;
            }
            index += 1;
        }
        out.extend_from_slice(&tokens[begin..]);
        Ok(out)
    }

    fn declaration<'a>(&mut self, tokens: &[Token<'a>]) -> Result<Vec<Token<'a>>, String> {
        let blank = tokens.iter().take_while(|token| token.is_blank()).count();
        let (lead, rest) = tokens.split_at(blank);
        let Some(first) = rest.first() else { return Ok(tokens.to_vec()) };
        let mut out = lead.to_vec();
        let (plain, attributes) = without_attributes(rest)?;
        let plain = code(&plain);
        let attribute = |wanted: &str| {
            attributes.iter().map(|one| call_parts(one)).find(|(name, _)| name == wanted).map(|(_, of)| of)
        };
        let is_instance = first.is("template") && plain.get(1).is_some_and(|next| !next.is("<"));
        let parameters = plain.iter().position(|token| token.is("(")).unwrap_or(plain.len());
        let has_word = |word: &str| plain[..parameters].iter().any(|token| token.is(word));
        if let Some(index) = attribute("function_constant")
            && parameters == plain.len()
        {
            out.push(first.raw(self.function_constant(&plain, &index)?));
            out.extend(newlines(rest));
        } else if is_instance {
            self.instance(&plain, attribute("host_name"))?;
            out.extend(newlines(rest));
        } else if attribute("kernel").is_some() || has_word("kernel") {
            out.extend(self.kernel(rest, attribute("host_name"))?);
        } else if let Some(text) = self.derived_constant(&plain) {
            out.push(first.raw(text));
            out.extend(newlines(rest));
        } else {
            out.extend(self.body(rest)?);
        }
        Ok(out)
    }

    /// `constant T name [[function_constant(index)]];` becomes a variable that the run time sets.
    fn function_constant<'a>(&mut self, plain: &[Token<'a>], index: &str) -> Result<String, String> {
        let location = plain[0].location();
        let [_, kind, name, _] = plain else {
            return Err(format!(
                "{location}: a function constant is `constant T name [[function_constant(0)]];`"
            ));
        };
        let index: u32 =
            index.parse().map_err(|_| format!("{location}: the index `{index}` is no number"))?;
        self.constants.push(FunctionConstant {
            index,
            kind: kind.text.to_string(),
            name: name.text.to_string(),
        });
        Ok(format!("MSL_FUNCTION_CONSTANT({}, {}, {index});", kind.text, name.text))
    }

    /// A constant that is computed from function constants is computed where it is used: when the library is
    /// loaded, they are not set.
    fn derived_constant<'a>(&mut self, plain: &[Token<'a>]) -> Option<String> {
        let equals = plain.iter().position(|token| token.is("="))?;
        let (head, value) = plain.split_at(equals);
        let is_constant = head.iter().any(|token| token.is("constant"));
        let depends = value.iter().any(|token| {
            self.derived.contains(&*token.text) || self.constants.iter().any(|one| token.is(&one.name))
        });
        if !is_constant || !depends || head.iter().any(|token| token.is_any(&["(", "{"])) {
            return None;
        }
        let (name, kind) = head.split_last()?;
        let kind: Vec<Token<'a>> = kind
            .iter()
            .filter(|token| !token.is_any(&["constant", "const", "static", "constexpr"]))
            .cloned()
            .collect();
        self.derived.insert(name.text.to_string());
        let value = spaced(&value[1..value.len() - 1]);
        Some(format!("MSL_DERIVED_CONSTANT({}, {}, ({value}));", spaced(&kind), name.text))
    }

    /// `template [[host_name("x")]] [[kernel]] decltype(f<T>) f<T>;`
    fn instance<'a>(&mut self, plain: &[Token<'a>], host_name: Option<String>) -> Result<(), String> {
        let location = plain[0].location();
        let wrong = || {
            format!(
                "{location}: an instance is `template [[host_name(\"x\")]] [[kernel]] decltype(f<T>) f<T>;`"
            )
        };
        let host_name = host_name.ok_or_else(wrong)?;
        let start = plain.iter().position(|token| token.is("decltype")).ok_or_else(wrong)?;
        let expression = plain.get(closing(plain, start + 1)? + 1..plain.len() - 1).ok_or_else(wrong)?;
        let kernel = expression.first().ok_or_else(wrong)?.text.to_string();
        self.instances.push(Instance {
            name: host_name.replace(['"', ' '], ""),
            expression: spaced(expression),
            kernel,
        });
        Ok(())
    }

    /// A kernel becomes a plain function; how its parameters are bound goes into a table.
    fn kernel<'a>(
        &mut self,
        tokens: &[Token<'a>],
        host_name: Option<String>,
    ) -> Result<Vec<Token<'a>>, String> {
        let mut out = Vec::new();
        let mut index = 0;
        let is_template = tokens[0].is("template");
        if is_template {
            let open = (1..tokens.len()).find(|&i| tokens[i].is("<")).unwrap_or(0);
            index = closing_angle(tokens, open)? + 1;
            out.extend_from_slice(&tokens[..index]);
        }
        while !tokens[index].is("(") {
            if is_attribute(tokens, index) {
                index = closing(tokens, index)?;
            } else if !tokens[index].is("kernel") {
                out.push(tokens[index].clone());
            }
            index += 1;
        }
        let end = closing(tokens, index)?;
        let name = code(&out).last().map(|token| token.text.to_string()).unwrap_or_default();
        out.push(tokens[index].clone());
        let mut parameters = Vec::new();
        for (number, parameter) in split_at_commas(&tokens[index + 1..end]).iter().enumerate() {
            if number > 0 {
                out.push(tokens[index].raw(","));
            }
            let (plain, attributes) = without_attributes(parameter)?;
            parameters.push(bound_parameter(&name, &plain, &attributes)?);
            out.extend(plain);
        }
        out.push(tokens[end].clone());
        self.num_threadgroup_variables = 0;
        out.extend(self.body(&tokens[end + 1..])?);
        if !is_template {
            let name = host_name.map_or_else(|| name.clone(), |host| host.replace('"', ""));
            self.instances.push(Instance { expression: name.clone(), kernel: name.clone(), name });
        }
        self.kernels.insert(name, parameters);
        Ok(out)
    }
}

/// Whether the tokens before a `{` make it the start of a function's body.
fn is_function_head(head: &[Token<'_>]) -> Result<bool, String> {
    let (plain, _) = without_attributes(head)?;
    let start = match &plain[..] {
        [first, open, ..] if first.is("template") && open.is("<") => closing_angle(&plain, 1)? + 1,
        _ => 0,
    };
    let plain = &plain[start..];
    if plain.first().is_some_and(|first| first.is_any(&["struct", "class", "enum", "union", "typedef"])) {
        return Ok(false);
    }
    let mut index = 0;
    let mut has_parameters = false;
    while index < plain.len() {
        if plain[index].is("=") {
            return Ok(false);
        }
        if plain[index].is("(") {
            has_parameters = true;
            index = closing(plain, index)?;
        }
        index += 1;
    }
    Ok(has_parameters)
}

fn bound_parameter(
    kernel: &str,
    plain: &[Token<'_>],
    attributes: &[Vec<Token<'_>>],
) -> Result<Parameter, String> {
    let text = spaced(plain);
    let wrong = |what: &str| format!("{kernel}: {what}: {text}");
    let [attribute] = attributes else { return Err(wrong("a parameter has one attribute")) };
    let (name, argument) = call_parts(attribute);
    let index = || argument.parse().map_err(|_| wrong("a binding is a number"));
    let kind = match &*name {
        "buffer" => ParameterKind::Buffer(index()?),
        "threadgroup" => ParameterKind::Threadgroup(index()?),
        _ => {
            let built_in = BUILT_INS.iter().position(|built_in| *built_in == name);
            ParameterKind::BuiltIn(built_in.ok_or_else(|| wrong("an unknown attribute"))?)
        }
    };
    Ok(Parameter { kind, is_reference: plain.iter().any(|token| token.is("&")) })
}
