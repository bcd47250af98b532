//! Random schemas, and a validator of values that shares no code with the grammars.

use fancy_regex::Regex;
use serde_json::{Map, Value, json};

/// Makes schemas from a seed.
#[derive(Debug)]
pub(crate) struct Schemas {
    state: u64,
    num_definitions: usize,
}

const WORDS: [&str; 8] = ["a", "name", "ünïcode", "two words", "q\"uote", "back\\slash", "true", "12"];
const PATTERNS: [&str; 8] = [
    "^[a-z]{2,5}$",
    r"^\d{3}-\d{2}$",
    "^(foo|bar)+$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)",
    r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{4,8}$",
    r#"^["\\a/]{1,3}$"#,
    "x",
];
const FORMATS: [&str; 9] =
    ["date", "date-time", "time", "email", "uuid", "ipv4", "ipv6", "hostname", "phone-number"];

impl Schemas {
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678, num_definitions: 0 }
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) as usize % limit
    }

    fn pick<'i, T>(&mut self, items: &'i [T]) -> &'i T {
        &items[self.below(items.len())]
    }

    /// A schema of an object with definitions, as programs make them.
    pub(crate) fn object(&mut self) -> Value {
        self.num_definitions = self.below(3);
        let mut schema = self.of_object(3);
        let definitions: Map<String, Value> = (0..self.num_definitions)
            .map(|index| {
                // A later one never refers to an earlier one, so that values end.
                self.num_definitions = index;
                (format!("d{index}"), self.any(2))
            })
            .collect();
        schema["$defs"] = definitions.into();
        schema
    }

    fn any(&mut self, depth: usize) -> Value {
        let num_kinds = if depth == 0 { 7 } else { 12 };
        let mut schema = match self.below(num_kinds) {
            0 => self.integer(),
            1 => self.number(),
            2 => self.string(),
            3 => json!({"type": "boolean"}),
            4 => json!({"enum": [*self.pick(&WORDS), *self.pick(&WORDS), self.below(100), null, 1.5]}),
            5 => json!({"const": *self.pick(&WORDS)}),
            6 => match self.num_definitions {
                0 => json!({"type": "null"}),
                num => json!({"$ref": format!("#/$defs/d{}", self.below(num))}),
            },
            7 => self.of_object(depth - 1),
            8 => self.of_list(depth - 1),
            9 => json!({"anyOf": [self.any(depth - 1), {"type": "null"}]}),
            10 => json!({"anyOf": [self.any(depth - 1), self.any(depth - 1), self.string()]}),
            _ => json!({"type": ["integer", "null", "string"], "minimum": 0, "maxLength": 4}),
        };
        if self.below(4) == 0 {
            schema["description"] = "about it".into();
        }
        schema
    }

    fn of_object(&mut self, depth: usize) -> Value {
        let mut properties = Map::new();
        for index in 0..self.below(5) {
            let name = format!("{}{index}", self.pick(&["key", "name_", "two words ", "ü\""]));
            properties.insert(name, self.any(depth));
        }
        let required: Vec<String> = properties.keys().filter(|_| self.below(3) > 0).cloned().collect();
        let mut schema = json!({"type": "object", "properties": properties, "required": required});
        match self.below(6) {
            0 => schema["additionalProperties"] = false.into(),
            1 => schema["additionalProperties"] = self.any(0),
            _ => {}
        }
        schema
    }

    fn of_list(&mut self, depth: usize) -> Value {
        let min = self.below(3);
        let mut schema = json!({"type": "array", "items": self.any(depth), "maxItems": min + self.below(3)});
        if min > 0 {
            schema["minItems"] = min.into();
        }
        if self.below(4) == 0 {
            schema["prefixItems"] = json!([self.any(0), self.any(0)]);
        }
        if self.below(4) == 0 {
            schema["uniqueItems"] = false.into();
        }
        schema
    }

    fn integer(&mut self) -> Value {
        let low = *self.pick(&[i64::MIN, -9_007_199_254_740_993, -50, -1, 0, 3, 990]);
        let high = *self.pick(&[1_000, 5_000, 9_007_199_254_740_993, i64::MAX]);
        match self.below(7) {
            0 => json!({"type": "integer"}),
            1 => json!({"type": "integer", "minimum": low}),
            2 => json!({"type": "integer", "maximum": high}),
            3 => json!({"type": "integer", "minimum": low, "maximum": high}),
            4 => json!({"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}),
            5 => json!({"type": "integer", "minimum": 0, "maximum": u64::MAX}),
            _ => {
                json!({"type": "integer", "multipleOf": *self.pick(&[1, 3, 25]), "minimum": -1000, "maximum": 1000})
            }
        }
    }

    fn number(&mut self) -> Value {
        let low = *self.pick(&[-1e6, -12.5, -0.001, 0.0, 0.3]);
        let high = *self.pick(&[0.5, 1.0, 3.75, 1e9]);
        match self.below(5) {
            0 => json!({"type": "number"}),
            1 => json!({"type": "number", "minimum": low}),
            2 => json!({"type": "number", "exclusiveMaximum": high}),
            3 => json!({"type": "number", "minimum": low, "maximum": high}),
            _ => json!({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}),
        }
    }

    fn string(&mut self) -> Value {
        let min = self.below(4);
        match self.below(5) {
            0 => json!({"type": "string", "maxLength": 12}),
            1 => json!({"type": "string", "minLength": min, "maxLength": min + self.below(4)}),
            2 => json!({"type": "string", "pattern": *self.pick(&PATTERNS)}),
            3 => json!({"type": "string", "format": *self.pick(&FORMATS), "maxLength": 40}),
            _ => json!({"type": "string", "enum": [*self.pick(&WORDS), *self.pick(&WORDS)]}),
        }
    }
}

/// The first violation of a value, if any. An object is closed if its schema names properties.
pub(crate) fn fault(value: &Value, schema: &Value, root: &Value) -> Option<String> {
    let Value::Object(fields) = schema else {
        return (schema == &Value::Bool(false)).then(|| format!("{value} under false"));
    };
    let wrong = |keyword: &str| Some(format!("{value} has a wrong {keyword}: {schema}"));
    for (keyword, given) in fields {
        let limit = given.as_f64().unwrap_or(f64::NAN);
        let number = value.as_f64().filter(|_| value.is_number());
        let length = value.as_str().map(|text| text.chars().count() as f64);
        let num_items = value.as_array().map(|items| items.len() as f64);
        let is_right = match keyword.as_str() {
            "type" => match given {
                Value::Array(kinds) => kinds.iter().any(|kind| is_of(value, kind)),
                kind => is_of(value, kind),
            },
            "enum" => given.as_array().unwrap().contains(value),
            "const" => given == value,
            "minimum" => order(value, given).is_none_or(std::cmp::Ordering::is_ge),
            "maximum" => order(value, given).is_none_or(std::cmp::Ordering::is_le),
            "exclusiveMinimum" => order(value, given).is_none_or(std::cmp::Ordering::is_gt),
            "exclusiveMaximum" => order(value, given).is_none_or(std::cmp::Ordering::is_lt),
            "multipleOf" => number.is_none_or(|number| number % limit == 0.0),
            "minLength" => length.is_none_or(|length| length >= limit),
            "maxLength" => length.is_none_or(|length| length <= limit),
            "minItems" => num_items.is_none_or(|length| length >= limit),
            "maxItems" => num_items.is_none_or(|length| length <= limit),
            "pattern" => value.as_str().is_none_or(|text| is_match(given.as_str().unwrap(), text)),
            "format" => value.as_str().is_none_or(|text| is_of_format(given.as_str().unwrap(), text)),
            "required" => value.as_object().is_none_or(|members| {
                given.as_array().unwrap().iter().all(|name| members.contains_key(name.as_str().unwrap()))
            }),
            "anyOf" | "oneOf" => {
                given.as_array().unwrap().iter().any(|branch| fault(value, branch, root).is_none())
            }
            "allOf" => given.as_array().unwrap().iter().all(|branch| fault(value, branch, root).is_none()),
            _ => true,
        };
        if !is_right {
            return wrong(keyword);
        }
    }
    if let Some(path) = fields.get("$ref").and_then(Value::as_str) {
        let target = root.pointer(path.trim_start_matches('#')).unwrap();
        if let Some(fault) = fault(value, target, root) {
            return Some(fault);
        }
    }
    if let (Value::Object(members), Some(Value::Object(properties))) = (value, fields.get("properties")) {
        let others = fields.get("additionalProperties").unwrap_or(&Value::Bool(false));
        let of =
            |(name, member): (&String, &Value)| fault(member, properties.get(name).unwrap_or(others), root);
        return members.iter().find_map(of);
    }
    let Value::Array(items) = value else { return None };
    let first = fields.get("prefixItems").and_then(Value::as_array).map_or(&[] as &[Value], Vec::as_slice);
    let rest = fields.get("items").unwrap_or(&Value::Bool(true));
    items.iter().enumerate().find_map(|(index, item)| fault(item, first.get(index).unwrap_or(rest), root))
}

/// Integers exactly, everything else as doubles.
fn order(value: &Value, limit: &Value) -> Option<std::cmp::Ordering> {
    let whole = |value: &Value| value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from));
    match (whole(value), whole(limit)) {
        (Some(value), Some(limit)) => Some(value.cmp(&limit)),
        _ => value.as_f64().filter(|_| value.is_number())?.partial_cmp(&limit.as_f64()?),
    }
}

fn is_of(value: &Value, kind: &Value) -> bool {
    match kind.as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("{other}"),
    }
}

fn is_match(pattern: &str, text: &str) -> bool {
    Regex::new(pattern).unwrap().is_match(text).unwrap()
}

fn is_of_format(format: &str, text: &str) -> bool {
    let date = |text: &str| {
        let parts: Vec<u32> = text.splitn(3, '-').map(|part| part.parse().unwrap_or(0)).collect();
        let [year, month, day] = parts[..] else { return false };
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let days = [31, if is_leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        text.len() == 10
            && year > 0
            && (1..=12).contains(&month)
            && (1..=days[month as usize - 1]).contains(&day)
    };
    let time = |text: &str| {
        is_match(r"^([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)$", text)
    };
    match format {
        "date" => date(text),
        "time" => time(text),
        "date-time" => text.split_once('T').is_some_and(|(day, clock)| date(day) && time(clock)),
        "email" => is_match(r"^[^@\s]+@([a-zA-Z0-9][a-zA-Z0-9-]*\.)+[a-zA-Z]{2,}$", text),
        "uuid" => is_match(r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$", text),
        "ipv4" => text.parse::<std::net::Ipv4Addr>().is_ok(),
        "ipv6" => text.parse::<std::net::Ipv6Addr>().is_ok(),
        "hostname" => is_match(r"^[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?$", text),
        _ => true,
    }
}
