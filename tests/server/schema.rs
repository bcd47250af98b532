//! The published description of the interface: it is complete, and a program that reads it finds no fault.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::client::Server;

fn document() -> Value {
    serde_json::from_str(include_str!("../../src/server/openapi.json")).unwrap()
}

/// The code of a file, without its tests.
fn source(path: &str) -> String {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path);
    let text = std::fs::read_to_string(&path).unwrap();
    text.split("#[cfg(test)]").next().unwrap().to_owned()
}

/// What stands between `before` and `after`, for each position where it does.
fn between<'a>(text: &'a str, before: &'a str, after: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(before).skip(1).filter_map(move |rest| Some(rest.split_once(after)?.0))
}

#[test]
fn every_route_is_described_and_every_description_is_a_route() {
    let router = source("src/server/router.rs");
    let routes: BTreeSet<(String, String)> = between(&router, ".route(\"", "(")
        .map(|route| {
            let (path, method) = route.split_once("\", ").unwrap();
            (path.replace("{*", "{"), method.to_owned())
        })
        // The page for people.
        .filter(|(path, _)| path != "/")
        .collect();
    let document = document();
    let described: BTreeSet<(String, String)> = document["paths"]
        .as_object()
        .unwrap()
        .iter()
        .flat_map(|(path, methods)| {
            methods.as_object().unwrap().keys().map(|method| (path.clone(), method.clone()))
        })
        .collect();
    assert_eq!(routes, described);
    let counted = source("src/server/http_counts.rs");
    for (path, _) in routes {
        assert!(counted.contains(&format!("\"{path}\"")), "answers of {path} are not counted by its name");
    }
}

/// All names of properties below a value, through references to other schemas.
fn properties(document: &Value, value: &Value, names: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            if let Some(Value::Object(found)) = fields.get("properties") {
                names.extend(found.keys().cloned());
            }
            if let Some(Value::String(reference)) = fields.get("$ref") {
                let target = document.pointer(reference.trim_start_matches('#')).unwrap();
                properties(document, target, names);
            }
            fields.values().for_each(|value| properties(document, value, names));
        }
        Value::Array(items) => items.iter().for_each(|value| properties(document, value, names)),
        _ => {}
    }
}

/// The files in a folder and in those inside it.
fn files(folder: &str) -> Vec<String> {
    let entries =
        std::fs::read_dir(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(folder)).unwrap();
    let files = entries.map(Result::unwrap).flat_map(|entry| {
        let path = format!("{folder}/{}", entry.file_name().to_str().unwrap());
        if entry.path().is_dir() { files(&path) } else { vec![path] }
    });
    files.filter(|path| !path.ends_with("tests.rs")).collect()
}

#[test]
fn every_field_that_is_read_is_described_and_the_other_way_round() {
    let mut read = BTreeSet::new();
    for path in files("src/server/api") {
        let text = source(&path);
        for method in [
            "bool",
            "unsigned",
            "count",
            "limit",
            "integer",
            "number",
            "string",
            "object",
            "token_ids",
            "take",
            "take_unread",
            "list",
        ] {
            read.extend(between(&text, &format!(".{method}(\""), "\"").map(str::to_owned));
        }
        for object in ["fields", "&mut fields", "function", "&mut item", "&mut block"] {
            read.extend(between(&text, &format!("({object}, \""), "\"").map(str::to_owned));
        }
        // Lists of names.
        read.extend(between(&text, "(\"", "\", Harmless::").map(str::to_owned));
        let lists = ["const RESERVED_VARIABLES", "const KINDS", "const REFUSED"];
        let lists = lists.into_iter().flat_map(|list| between(&text, list, "];\n"));
        for list in lists.chain(between(&text, "for name in [", "]")) {
            let names = list.split('"').skip(1).step_by(2);
            read.extend(names.filter(|name| !name.contains('.')).map(str::to_owned));
        }
    }
    assert!(read.len() > 60, "{read:?}");
    let document = document();
    let mut described = BTreeSet::new();
    for name in [
        "ChatRequest",
        "CompletionRequest",
        "MessagesRequest",
        "CountTokensRequest",
        "ResponsesRequest",
        "OllamaChatRequest",
        "OllamaGenerateRequest",
        "OllamaShowRequest",
        "TokenizeRequest",
        "DetokenizeRequest",
    ] {
        properties(&document, &document["components"]["schemas"][name], &mut described);
    }
    let missing: Vec<_> = read.difference(&described).collect();
    let unknown: Vec<_> = described.difference(&read).collect();
    assert!(missing.is_empty(), "not in openapi.json: {missing:?}");
    assert!(unknown.is_empty(), "in openapi.json, but not read: {unknown:?}");
}

/// Needs Python with the package `schemathesis`; prints a line if it is missing.
#[test]
fn schemathesis_finds_no_fault() {
    let python = std::env::var("TINYVLLM_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let runs = |module: &str| {
        let output = Command::new(&python).args(["-c", &format!("import {module}")]).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !runs("schemathesis") {
        let is_required = std::env::var_os("TINYVLLM_REQUIRE_SCHEMATHESIS").is_some();
        assert!(!is_required, "{python} has no package schemathesis");
        // Past the capture of output, so that it is seen.
        let _ = writeln!(std::io::stderr(), "skipped: {python} has no package schemathesis");
        return;
    }
    let server = Server::start("--max-model-len 64 --max-num-seqs 4 --api-key secret --disable-access-log");
    let folder = tempfile::tempdir().unwrap();
    // What a schema cannot say (the size of the vocabulary, the window, which fields go together) is no fault.
    let script = "from schemathesis.cli import schemathesis; schemathesis()";
    let checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,\
                  negative_data_rejection,unsupported_method,ignored_auth";
    let output = Command::new(&python)
        .current_dir(folder.path())
        .args(["-c", script, "run", &format!("http://{}/openapi.json", server.address())])
        .args([
            "-H",
            "Authorization: Bearer secret",
            "--checks",
            checks,
            "--phases",
            "examples,coverage,fuzzing",
        ])
        // As many as that and not as long as that: the same requests on every machine. What breaks one type or bound in a
        // small request is tried without chance in `bounds.rs`.
        .args(["--max-examples", "15", "--seed", "1", "--no-color", "--suppress-health-check", "all"])
        .args(["--request-timeout", "20", "--generation-database", "none"])
        .output()
        .unwrap();
    let report = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{report}{}", String::from_utf8_lossy(&output.stderr));
    server.get("/health").success();
    for gauge in ["vllm:num_requests_running", "vllm:num_requests_waiting"] {
        let page = super::client::send(
            server.address(),
            "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer secret\r\n\r\n",
        );
        let line = page.text().lines().find(|line| line.starts_with(gauge)).map(str::to_owned).unwrap();
        assert!(line.ends_with(" 0"), "{line}");
    }
}
