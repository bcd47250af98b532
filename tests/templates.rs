//! Chat templates of real models, against Jinja2 at test time.
//!
//! The templates come from the source of llama.cpp, of which nothing is in this repository: `TINYVLLM_LLAMA_CPP` names
//! its folder, `TINYVLLM_JINJA_PYTHON` a Python that has `jinja2`. `scripts/test_data.sh` gets both; without them the
//! test says that it skips, unless `TINYVLLM_REQUIRE_LLAMA_CPP=1` or `TINYVLLM_REQUIRE_JINJA=1` is set.

use std::collections::BTreeMap;
use std::env;
use std::process::Command;

use serde_json::Value;
use tinyvllm::chat::ChatTemplate;

#[test]
fn templates_of_real_models_are_rendered_as_jinja_renders_them() {
    let (Some(source), Some(python)) =
        (env::var_os("TINYVLLM_LLAMA_CPP"), env::var_os("TINYVLLM_JINJA_PYTHON"))
    else {
        let is_required = ["TINYVLLM_REQUIRE_LLAMA_CPP", "TINYVLLM_REQUIRE_JINJA"]
            .iter()
            .any(|name| env::var_os(name).is_some_and(|value| value == "1"));
        assert!(!is_required, "TINYVLLM_LLAMA_CPP and TINYVLLM_JINJA_PYTHON are not set");
        println!("skipped: TINYVLLM_LLAMA_CPP and TINYVLLM_JINJA_PYTHON name what this test needs");
        return;
    };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/render_templates.py");
    let output = Command::new(python).arg(script).arg(source).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let cases: Vec<(String, String, Value, Option<String>)> = serde_json::from_slice(&output.stdout).unwrap();

    let mut templates = BTreeMap::new();
    let (mut num_rendered, mut wrong) = (BTreeMap::<&str, usize>::new(), Vec::new());
    for (name, template, variables, expected) in &cases {
        // Where Jinja2 fails, there is nothing to be equal to.
        let Some(expected) = expected else { continue };
        let group = name.split('/').next().unwrap();
        *num_rendered.entry(group).or_default() += 1;
        let compiled = templates.entry(template).or_insert_with(|| ChatTemplate::new(template));
        match compiled
            .as_ref()
            .map_err(ToString::to_string)
            .and_then(|template| template.render(variables).map_err(|error| error.to_string()))
        {
            Ok(rendered) if rendered == *expected => {}
            Ok(rendered) => wrong.push(format!("{name}\n  writes {rendered:?}\n  not    {expected:?}")),
            Err(error) => wrong.push(format!("{name}: {error}")),
        }
    }
    println!("{num_rendered:?}");
    assert!(num_rendered["templates"] >= 1_500, "{num_rendered:?}");
    assert!(num_rendered["older"] >= 700, "{num_rendered:?}");
    assert!(num_rendered["jinja"] >= 290, "{num_rendered:?}");
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}
