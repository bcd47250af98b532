//! The class of a chip, by the system's names.

use super::ChipClass;

impl ChipClass {
    /// From the architecture's name, such as `applegpu_g14s`, or else from the chip's, such as `Apple M2 Max`. Unknown
    /// names count as small chips.
    pub(in crate::ops::gpu) fn from_names(architecture: &str, name: &str) -> Self {
        let letter = architecture.strip_prefix("applegpu_").and_then(|rest| rest.chars().next_back());
        match letter {
            Some('p' | 'g') => Self::Base,
            Some('s') => Self::Max,
            Some('d') => Self::Ultra,
            _ if name.ends_with("Ultra") => Self::Ultra,
            _ if name.ends_with("Max") => Self::Max,
            _ => Self::Base,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chips_are_known_by_either_name() {
        let check = |architecture, name, class| {
            assert_eq!(ChipClass::from_names(architecture, name), class, "{architecture} {name}");
        };
        check("applegpu_g13g", "Apple M1", ChipClass::Base);
        check("applegpu_g16p", "Apple A18", ChipClass::Base);
        check("applegpu_g14s", "Apple M2 Max", ChipClass::Max);
        check("applegpu_g14d", "Apple M2 Ultra", ChipClass::Ultra);
        check("unknown", "Apple M3 Ultra", ChipClass::Ultra);
        check("", "Apple M4 Max", ChipClass::Max);
        // A virtual machine's device; "air64_v26s" does not name the chip.
        check("air64_v26s", "Apple Paravirtual device", ChipClass::Base);
        check("applegpu_g19x", "Apple M9 Pro", ChipClass::Base);
    }
}
