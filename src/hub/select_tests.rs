use super::*;
use crate::hub::source::ModelSource;

fn model(argument: &str) -> HubModel {
    match ModelSource::parse(argument, None).unwrap() {
        ModelSource::Hub(model) => model,
        other => panic!("{argument} is {other:?}"),
    }
}

fn files(names: &str) -> Vec<String> {
    names.split_whitespace().map(str::to_owned).collect()
}

fn folder(companions: &str, weights: Weights) -> Selection {
    Selection::Folder { companions: files(companions), weights }
}

#[test]
fn a_folder_takes_only_what_it_needs() {
    let check = |names: &str, expected: Selection| {
        assert_eq!(select(&model("org/name"), &files(names)).unwrap(), expected, "{names}");
    };
    check(
        "README.md LICENSE .gitattributes config.json generation_config.json tokenizer.json tokenizer.model \
         tokenizer_config.json special_tokens_map.json chat_template.jinja model.safetensors pytorch_model.bin \
         consolidated.00.pth original/consolidated.00.pth onnx/model.onnx flax_model.msgpack",
        folder(
            "chat_template.jinja config.json generation_config.json special_tokens_map.json tokenizer.json \
             tokenizer_config.json",
            Weights::Files(files("model.safetensors")),
        ),
    );
    check(
        "config.json consolidated.safetensors model-00001-of-00002.safetensors model-00002-of-00002.safetensors \
         model.safetensors.index.json",
        folder("config.json", Weights::Index(INDEX.to_owned())),
    );
    check(
        "config.json consolidated.safetensors model-00002-of-00002.safetensors model-00001-of-00002.safetensors",
        folder(
            "config.json",
            Weights::Files(files("model-00001-of-00002.safetensors model-00002-of-00002.safetensors")),
        ),
    );
    check(
        "config.json model.safetensors quantize_config.json",
        folder("config.json quantize_config.json", Weights::Files(files("model.safetensors"))),
    );
    // A repository with both kinds is a folder unless a type is requested.
    check(
        "config.json model.safetensors name-Q4_0.gguf name-Q8_0.gguf",
        folder("config.json", Weights::Files(files("model.safetensors"))),
    );
    // The only GGUF model needs no type.
    check("name.gguf README.md", Selection::Gguf(files("name.gguf")));
    check("config.json name.gguf", Selection::Gguf(files("name.gguf")));
}

#[test]
fn a_folder_that_cannot_be_loaded_is_refused() {
    let check = |names: &str, kind: ErrorKind, word: &str| {
        let error = select(&model("org/name"), &files(names)).unwrap_err();
        assert_eq!(error.kind(), kind, "{names}: {error:?}");
        assert!(format!("{error:?}").contains(word), "{names}: {error:?}");
    };
    check("config.json pytorch_model.bin", ErrorKind::Unsupported, "neither");
    check("model.safetensors", ErrorKind::Unsupported, "config.json");
    check("config.json consolidated.safetensors", ErrorKind::Unsupported, "neither");
    check("config.json original/model.safetensors", ErrorKind::Unsupported, "neither");
    check("", ErrorKind::Unsupported, "neither");
    check("config.json ../model.safetensors", ErrorKind::Unsupported, "neither");
    check("config.json model-00001-of-00002.safetensors", ErrorKind::InvalidModel, "2 shards");
    check("a-Q4_0.gguf a-Q8_0.gguf", ErrorKind::NotFound, "a-Q4_0.gguf, a-Q8_0.gguf");
}

#[test]
fn a_type_picks_its_gguf_file() {
    const TYPICAL: &str = "README.md a.Q2_K.gguf a.Q4_K.gguf a.Q4_K_M.gguf a.Q4_K_S.gguf a.IQ4_XS.gguf \
         a.Q8_0.gguf mmproj-a-Q8_0.gguf a.imatrix.gguf";
    let check = |names: &str, wanted: &str, expected: &str| {
        assert_eq!(
            select(&model(&format!("org/name:{wanted}")), &files(names)).unwrap(),
            Selection::Gguf(files(expected)),
            "{wanted}"
        );
    };
    check(TYPICAL, "Q4_K_M", "a.Q4_K_M.gguf");
    check(TYPICAL, "q4_k_m", "a.Q4_K_M.gguf");
    check(TYPICAL, "Q4_K", "a.Q4_K.gguf");
    check(TYPICAL, "q8_0", "a.Q8_0.gguf");
    check(TYPICAL, "iq4_xs", "a.IQ4_XS.gguf");
    check(TYPICAL, "a.Q4_K_S.gguf", "a.Q4_K_S.gguf");
    check("a-q4_0.gguf a-fp16.gguf", "FP16", "a-fp16.gguf");
    check("a_Q4_0.gguf a_Q8_0.gguf", "Q8_0", "a_Q8_0.gguf");
    check("A-Q8_0.GGUF", "q8_0", "A-Q8_0.GGUF");
    check("a-UD-Q4_K_XL.gguf a-Q4_K_M.gguf", "UD-Q4_K_XL", "a-UD-Q4_K_XL.gguf");
    check(
        "Q8_0/a-Q8_0-00002-of-00002.gguf Q8_0/a-Q8_0-00001-of-00002.gguf a-Q4_0.gguf",
        "Q8_0",
        "Q8_0/a-Q8_0-00001-of-00002.gguf Q8_0/a-Q8_0-00002-of-00002.gguf",
    );
    check(
        "a-Q8_0-00001-of-00002.gguf a-Q8_0-00002-of-00002.gguf",
        "a-Q8_0-00002-of-00002.gguf",
        "a-Q8_0-00001-of-00002.gguf a-Q8_0-00002-of-00002.gguf",
    );
}

#[test]
fn a_type_that_is_absent_or_not_unique_lists_what_exists() {
    let check = |names: &str, wanted: &str, kind: ErrorKind, words: &[&str]| {
        let error = select(&model(&format!("org/name:{wanted}")), &files(names)).unwrap_err();
        assert_eq!(error.kind(), kind, "{wanted}");
        for word in words {
            assert!(error.message().contains(word), "{wanted}: {error:?}");
        }
        assert!(kind == ErrorKind::InvalidModel || error.hint().is_some());
    };
    check(
        "a-Q4_0.gguf a-Q8_0.gguf",
        "Q5_K_M",
        ErrorKind::NotFound,
        &["`Q5_K_M`", "a-Q4_0.gguf", "a-Q8_0.gguf"],
    );
    check(
        "a-Q4_0.gguf b-Q4_0.gguf c.gguf",
        "q4_0",
        ErrorKind::NotFound,
        &["several", "a-Q4_0.gguf, b-Q4_0.gguf"],
    );
    check("config.json model.safetensors", "Q4_0", ErrorKind::NotFound, &["no GGUF files"]);
    check(
        "a-Q8_0-00001-of-00003.gguf a-Q8_0-00003-of-00003.gguf",
        "Q8_0",
        ErrorKind::InvalidModel,
        &["3 shards"],
    );
    check("a-Q8_0-00001-of-00000.gguf", "Q8_0", ErrorKind::InvalidModel, &["0 shards"]);
}

#[test]
fn an_index_names_its_shards_once_and_only_inside_the_folder() {
    let index = br#"{"metadata": {"total_size": 1}, "weight_map":
        {"a": "m-00002-of-00002.safetensors", "b": "m-00001-of-00002.safetensors", "c": "m-00002-of-00002.safetensors"}}"#;
    assert_eq!(
        shards(&model("org/name"), index).unwrap(),
        files("m-00001-of-00002.safetensors m-00002-of-00002.safetensors")
    );
    for hostile in ["../x.safetensors", "/etc/passwd", "a/../../x", "C:x", "a\\\\b", ""] {
        let index = format!(r#"{{"weight_map": {{"a": "{hostile}"}}}}"#);
        let error = shards(&model("org/name"), index.as_bytes()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidModel, "{hostile}");
    }
    assert!(shards(&model("org/name"), b"not json").is_err());
    assert!(shards(&model("org/name"), b"{}").is_err());
}

#[test]
fn a_folder_on_disk_may_hold_one_gguf_model() {
    assert_eq!(only_gguf("f", &files("a.gguf b.txt")).unwrap(), "a.gguf");
    assert_eq!(
        only_gguf("f", &files("a-00002-of-00002.gguf a-00001-of-00002.gguf")).unwrap(),
        "a-00001-of-00002.gguf"
    );
    assert!(only_gguf("f", &files("a.gguf b.gguf")).unwrap_err().message().contains("a.gguf, b.gguf"));
    assert_eq!(only_gguf("f", &files("a.txt")).unwrap_err().kind(), ErrorKind::NotFound);
}

proptest::proptest! {
    /// For every list of a server, no code panics and every chosen name stays inside its folder.
    #[test]
    fn any_list_of_names_is_survived(names in proptest::collection::vec("[a-zQ4_.\\-/0-9é\\\\]{0,20}(\\.gguf|\\.safetensors|)", 0..8)) {
        for argument in ["org/name", "org/name:Q4_0"] {
            if let Ok(Selection::Gguf(parts)) = select(&model(argument), &names) {
                let is_inside = |part: &String| {
                    std::path::Path::new(part).components().all(|c| matches!(c, std::path::Component::Normal(_)))
                };
                assert!(parts.iter().all(is_inside), "{parts:?}");
            }
        }
    }
}
