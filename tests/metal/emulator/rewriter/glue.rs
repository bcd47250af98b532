//! The tables by which the run time finds kernels, their parameters and the function constants.

use std::fmt::Write as _;

use super::{Instance, Mode, Parameter, ParameterKind, Rewriter};

impl Rewriter {
    pub(super) fn glue(&self, text: &mut String) -> Result<(), String> {
        match self.mode {
            Mode::Run | Mode::Unrolled => self.tables(text),
            Mode::AddressSpaces => self.uses(text),
        }
    }

    fn parameters(&self, instance: &Instance) -> Result<&[Parameter], String> {
        let parameters = self.kernels.get(&instance.kernel);
        parameters
            .map(Vec::as_slice)
            .ok_or_else(|| format!("{}: there is no kernel {}", instance.name, instance.kernel))
    }

    fn tables(&self, text: &mut String) -> Result<(), String> {
        for (number, instance) in self.instances.iter().enumerate() {
            let mut rows = String::new();
            for (position, parameter) in self.parameters(instance)?.iter().enumerate() {
                let (kind, index) = number_of(parameter.kind);
                let size = match parameter.is_reference {
                    true => format!("msl_parameter_size<{position}>({})", instance.expression),
                    false => "0".to_owned(),
                };
                _ = write!(rows, "{{{kind}, {index}, {size}}}, ");
            }
            _ = writeln!(
                text,
                "static const MslParameter msl_parameters_{number}[] = {{{rows}{{-1, 0, 0}}}};"
            );
        }
        text.push_str("extern \"C\" const MslKernel msl_kernels[] = {\n");
        for (number, instance) in self.instances.iter().enumerate() {
            let Instance { name, expression, .. } = instance;
            _ = writeln!(
                text,
                "{{\"{name}\", msl_enter<decltype(&{expression}), &{expression}>, msl_parameters_{number}}},"
            );
        }
        text.push_str("{nullptr, nullptr, nullptr}};\nextern \"C\" const MslConstant msl_constants[] = {\n");
        for constant in &self.constants {
            _ = writeln!(text, "{{{}, sizeof({}), &{}}},", constant.index, constant.kind, constant.name);
        }
        text.push_str("{-1, 0, nullptr}};\n");
        Ok(())
    }

    /// Names each instance once, so that the compiler looks into it.
    fn uses(&self, text: &mut String) -> Result<(), String> {
        text.push_str("void msl_uses() {\n");
        for instance in &self.instances {
            self.parameters(instance)?;
            _ = writeln!(text, "(void)&{};", instance.expression);
        }
        text.push_str("}\n");
        Ok(())
    }
}

fn number_of(kind: ParameterKind) -> (usize, usize) {
    match kind {
        ParameterKind::Buffer(index) => (0, index),
        ParameterKind::Threadgroup(index) => (1, index),
        ParameterKind::BuiltIn(index) => (2, index),
    }
}
