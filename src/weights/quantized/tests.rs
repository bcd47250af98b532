//! The formats of other programs, against the values that they encode.

use std::path::Path;

use ::safetensors::tensor::TensorView;
use ::safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::ErrorKind;
use crate::weights::blocks;
use crate::weights::{Checkpoint, DType, Quantization, Quantizer};

/// Name, type, shape and bytes.
type ComponentTensor = (String, Dtype, Vec<usize>, Vec<u8>);

/// A matrix in one of the formats.
#[derive(Clone)]
struct Case {
    name: String,
    config: Value,
    parts: Vec<ComponentTensor>,
    golden: Vec<f32>,
}

fn cases() -> Vec<Case> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantized.safetensors");
    let bytes = std::fs::read(path).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut cases: Vec<Case> = Vec::new();
    let mut configs: Vec<_> = metadata.metadata().clone().unwrap().into_iter().collect();
    configs.sort();
    for (name, config) in configs {
        let prefix = format!("{name}/");
        let mut case = Case {
            name,
            config: serde_json::from_str(&config).unwrap(),
            parts: Vec::new(),
            golden: Vec::new(),
        };
        for (own, tensor) in file.tensors() {
            match own.strip_prefix(&prefix) {
                Some("golden") => {
                    let values = tensor.data().as_chunks().0.iter();
                    case.golden = values.map(|value| f32::from_le_bytes(*value)).collect();
                }
                Some(own) => {
                    let (dtype, shape, data) = (tensor.dtype(), tensor.shape(), tensor.data());
                    case.parts.push((own.to_owned(), dtype, shape.to_vec(), data.to_vec()));
                }
                None => {}
            }
        }
        cases.push(case);
    }
    cases
}

fn case(name: &str) -> Case {
    cases().into_iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no case {name}"))
}

const NAME: &str = "blk.0.ffn_up.weight";

impl Case {
    fn open(&self) -> crate::Result<Checkpoint> {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
        write("config.json", json!({"quantization_config": self.config}).to_string().as_bytes());
        let views = self.parts.iter().map(|(name, dtype, shape, data)| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        write("model.safetensors", &safetensors::serialize(views, None).unwrap());
        // The mapping outlives the folder.
        Checkpoint::open(folder.path())
    }

    fn part(&mut self, ending: &str) -> &mut ComponentTensor {
        self.parts.iter_mut().find(|(name, ..)| name.ends_with(ending)).unwrap()
    }
}

#[test]
fn values_are_those_that_the_formats_mean() {
    let all = cases();
    assert_eq!(all.len(), 37);
    for case in &all {
        let checkpoint = case.open().unwrap();
        checkpoint.ensure_supported().unwrap();
        let names: Vec<_> = checkpoint.tensor_names().collect();
        let [name] = names[..] else { panic!("{}: {names:?}", case.name) };
        let tensor = checkpoint.tensor(name).unwrap();
        assert!(tensor.is_packed() && tensor.data().is_err(), "{}", case.name);
        let file_bytes: usize = case.parts.iter().map(|(.., data)| data.len()).sum();
        assert_eq!(tensor.num_bytes(), file_bytes, "{}", case.name);
        assert_eq!(checkpoint.shape(name), Some(tensor.shape), "{}", case.name);
        if case.name == "mxfp4_experts" {
            assert_eq!((name, tensor.shape), ("blk.0.ffn_gate_up_exps.weight", &[2, 8, 64][..]));
            let part = tensor.matrix(1).unwrap();
            assert!(part.rows(4, &[4, 64]).unwrap().to_f32().unwrap() == case.golden[12 * 64..]);
            let halves = [tensor.matrix(0).unwrap(), part].map(|half| half.num_bytes());
            assert_eq!(halves.iter().sum::<usize>(), file_bytes);
        } else {
            assert_eq!((name, tensor.shape), (NAME, &[16, 64][..]), "{}", case.name);
        }
        assert!(tensor.to_f32().unwrap() == case.golden, "{} differs", case.name);
    }
}

/// The type that a matrix of each format is loaded as, and whether it is exact.
#[test]
fn own_types_hold_what_they_can() {
    for (name, dtype, fidelity) in [
        ("gptq", DType::Q4_0, "exact"),
        ("gptq_zeros", DType::Q5_0, "exact"),
        ("gptq_v2", DType::Q5_0, "exact"),
        ("gptq_without_zeros", DType::Q4_0, "exact"),
        ("gptq_ordered", DType::Q8_0, "encoded"),
        ("gptq_small_groups", DType::Q8_0, "encoded"),
        ("gptq_2_bits", DType::Q4_0, "exact"),
        ("gptq_3_bits", DType::Q4_0, "exact"),
        ("gptq_8_bits", DType::Q8_0, "exact"),
        ("gptq_8_bits_zeros", DType::Q8_0, "encoded"),
        ("awq", DType::Q5_0, "exact"),
        ("awq_one_group", DType::Q4_0, "exact"),
        ("w4a16", DType::Q4_0, "exact"),
        ("w4a16_bf16", DType::Q4_0, "exact"),
        ("w4a16_f32", DType::Q4_0, "rounded"),
        ("w4a16_zeros", DType::Q5_0, "exact"),
        ("w4a16_ordered", DType::Q8_0, "encoded"),
        ("w8a16", DType::Q8_0, "exact"),
        ("w6a16", DType::Q8_0, "exact"),
        ("w8a8", DType::Q8_0, "rounded"),
        ("w8a8_one_scale", DType::Q8_0, "exact"),
        ("fp8_blocks", DType::Q8_0, "encoded"),
        ("mxfp4", DType::Mxfp4, "exact"),
        ("mxfp4_far", DType::Mxfp4, "exact"),
        ("mxfp4_packed", DType::Mxfp4, "exact"),
        ("nvfp4", DType::Q8_0, "encoded"),
        ("nf4_nested", DType::Q8_0, "encoded"),
        ("int8", DType::Q8_0, "rounded"),
    ] {
        let case = case(name);
        let checkpoint = case.open().unwrap();
        let tensor = checkpoint.tensor(NAME).unwrap();
        assert_eq!(tensor.dtype, dtype, "{name}");
        let quantizer = Quantizer::unpacking(std::num::NonZeroUsize::new(2));
        let converted = quantizer.quantize(std::slice::from_ref(&tensor), &|_| ()).unwrap().remove(0);
        let converted = converted.as_raw();
        assert_eq!((converted.dtype, converted.shape), (dtype, tensor.shape), "{name}");
        let num_bytes = converted.data().unwrap().len() as u64;
        assert_eq!(quantizer.planned_bytes(&checkpoint, |file_type| file_type).unwrap(), num_bytes, "{name}");
        let values = converted.to_f32().unwrap();
        let notices = checkpoint.notices(false).join("; ");
        match fidelity {
            "exact" => {
                assert!(values == case.golden, "{name} differs");
                assert!(!notices.contains("matri"), "{name}: {notices}");
            }
            "rounded" => {
                let close = |(a, b): (&f32, &f32)| (a - b).abs() <= b.abs() / 2048.0;
                assert!(values != case.golden && values.iter().zip(&case.golden).all(close), "{name}");
                assert!(notices.contains("scales that are rounded"), "{name}: {notices}");
            }
            _ => {
                let mut bytes = vec![0; dtype.row_bytes(values.len()).unwrap()];
                blocks::quantize(dtype, &case.golden, &mut bytes).unwrap();
                assert!(converted.data().unwrap() == bytes, "{name}");
                assert!(notices.contains("are rounded to Q8_0 while loading, since"), "{name}: {notices}");
            }
        }
    }
}

#[test]
fn a_type_that_was_asked_for_is_made_from_the_values() {
    for case in cases().iter().filter(|case| !["mxfp4_experts", "mxfp4_far"].contains(&case.name.as_str())) {
        let checkpoint = case.open().unwrap();
        let tensor = checkpoint.tensor(NAME).unwrap();
        for (quantizer, dtype) in [
            (Quantizer::new(Quantization::Q4_0, &checkpoint, None), DType::Q4_0),
            (Quantizer::to_dense(DType::BF16, std::num::NonZeroUsize::MIN), DType::BF16),
            (Quantizer::to_dense(DType::F32, std::num::NonZeroUsize::MIN), DType::F32),
        ] {
            let mut expected = vec![0; dtype.row_bytes(case.golden.len()).unwrap()];
            blocks::quantize(dtype, &case.golden, &mut expected).unwrap();
            assert_eq!(quantizer.loaded_dtype_of(&tensor), dtype, "{}", case.name);
            if dtype == tensor.dtype {
                // It has the very codes of that type.
                continue;
            }
            let converted = quantizer.quantize(std::slice::from_ref(&tensor), &|_| ()).unwrap().remove(0);
            assert!(converted.as_raw().data().unwrap() == expected, "{} as {dtype}", case.name);
        }
        assert!(!checkpoint.notices(true).join(";").contains("while loading"), "{}", case.name);
    }
}

/// Damage is an error that names a tensor, when it is read and before loading.
#[test]
fn damaged_parts_are_named() {
    let check = |name: &str, expected: &[&str], damage: &dyn Fn(&mut Case)| {
        let mut case = case(name);
        damage(&mut case);
        let checkpoint = case.open().unwrap();
        let error = checkpoint.ensure_supported().expect_err(name);
        assert!(matches!(error.kind(), ErrorKind::InvalidModel | ErrorKind::Unsupported), "{error:?}");
        for word in expected {
            assert!(error.message().contains(word), "{name}: {error} does not say {word}");
        }
        assert!(checkpoint.tensor(NAME).is_err(), "{name}");
    };
    let remove =
        |ending: &'static str| move |case: &mut Case| case.parts.retain(|(name, ..)| !name.ends_with(ending));
    // Half as many rows of another shape, with the bytes that it takes.
    let shorten = |ending: &'static str| {
        move |case: &mut Case| {
            let (_, _, shape, data) = case.part(ending);
            assert!(shape[0] > 1);
            let row = data.len() / shape[0];
            shape[0] -= 1;
            data.truncate(shape[0] * row);
        }
    };
    let retype = |ending: &'static str, dtype: Dtype| move |case: &mut Case| case.part(ending).1 = dtype;
    let set = |key: &'static str, value: Value| move |case: &mut Case| case.config[key] = value.clone();
    check("gptq", &["up_proj.scales", "missing"], &remove(".scales"));
    check("gptq", &["up_proj.qzeros", "missing"], &|case| {
        remove(".qzeros")(case);
        set("sym", json!(false))(case);
    });
    check("gptq", &["up_proj.qzeros", "[1, 2]"], &shorten(".qzeros"));
    check("gptq", &["up_proj.g_idx", "[63]"], &shorten(".g_idx"));
    check("gptq", &["up_proj.qweight", "F32"], &retype(".qweight", Dtype::F32));
    check("gptq_ordered", &["up_proj.g_idx", "group -1"], &|case| case.part(".g_idx").3[..4].fill(255));
    check("gptq_zeros", &["group_size", "0"], &set("group_size", json!(0)));
    check("gptq", &["up_proj.qweight", "marlin"], &set("checkpoint_format", json!("marlin")));
    check("gptq", &["up_proj.qweight", "marlin"], &set("is_marlin_format", json!(true)));
    check("awq", &["up_proj.qzeros", "[1, 2]"], &shorten(".scales"));
    check("awq", &["up_proj.qzeros", "missing"], &remove(".qzeros"));
    check("awq", &["up_proj.qweight", "gemv"], &set("version", json!("gemv")));
    check("awq", &["group_size", "0"], &set("group_size", json!(0)));
    check("w4a16", &["up_proj.weight_shape", "missing"], &remove(".weight_shape"));
    check("w4a16", &["up_proj.weight_packed", "weight_shape is [16, 640]"], &|case| {
        case.part(".weight_shape").3[8..16].copy_from_slice(&640_u64.to_le_bytes());
    });
    check("w4a16", &["up_proj.weight_shape", "not a shape"], &|case| case.part(".weight_shape").3.fill(255));
    check("w4a16", &["up_proj.weight_scale", "[15, 2]"], &shorten(".weight_scale"));
    check("w4a16_zeros", &["up_proj.weight_zero_point", "[1, 2]"], &shorten(".weight_zero_point"));
    check("w8a8", &["up_proj.weight_scale", "[15, 1]"], &shorten(".weight_scale"));
    check("fp8_blocks", &["up_proj.weight_scale_inv", "I32"], &retype(".weight_scale_inv", Dtype::I32));
    check("fp8_blocks", &["up_proj.weight_scale_inv", "missing"], &remove(".weight_scale_inv"));
    check("fp8_rows", &["up_proj.weight_scale", "[15, 1]"], &shorten(".weight_scale"));
    check("mxfp4", &["up_proj_scales", "missing"], &remove("_scales"));
    check("mxfp4", &["up_proj_scales", "[15, 2]"], &shorten("_scales"));
    check("nvfp4", &["up_proj.weight_global_scale", "missing"], &remove(".weight_global_scale"));
    check("nf4", &["up_proj.weight.absmax", "[31]"], &shorten(".absmax"));
    check("nf4", &["up_proj.weight.quant_map", "[15]"], &shorten(".quant_map"));
    check("nf4", &["quant_state.bitsandbytes__nf4", "missing"], &remove("__nf4"));
    check("nf4", &["quant_state.bitsandbytes__nf4", "cannot be read"], &|case| {
        case.part("__nf4").3.fill(b' ')
    });
    check("nf4_nested", &["up_proj.weight.nested_absmax", "[3]"], &shorten(".nested_absmax"));
    check("int8", &["up_proj.SCB", "[15]"], &shorten(".SCB"));
    check("int8", &["up_proj.weight_format", "certain GPUs"], &|case| case.part(".weight_format").3.fill(1));
}

/// For every damage of a tensor, the matrix is an error or some values.
#[test]
fn any_damage_is_an_error_or_a_value() {
    let read = |case: &Case| {
        let Ok(checkpoint) = case.open() else { return false };
        if checkpoint.ensure_supported().is_err() {
            return false;
        }
        let quantizer = Quantizer::unpacking(std::num::NonZeroUsize::new(1));
        let names: Vec<_> = checkpoint.tensor_names().map(str::to_owned).collect();
        names.iter().all(|name| {
            let Ok(tensor) = checkpoint.tensor(name) else { return false };
            // Stored words are unchanged.
            !tensor.is_packed()
                || tensor.to_f32().is_ok_and(|values| values.len() == tensor.num_elements())
                    && quantizer.quantize(std::slice::from_ref(&tensor), &|_| ()).is_ok()
        })
    };
    let (mut num_values, mut num_errors) = (0, 0);
    for case in cases() {
        for index in 0..case.parts.len() {
            let size = |part: &ComponentTensor| part.2.iter().product::<usize>().max(1);
            let damages: [&dyn Fn(&mut ComponentTensor); 7] = [
                &|part| part.3.fill(0),
                &|part| part.3.fill(255),
                &|part| part.2.reverse(),
                &|part| part.2 = vec![size(part)],
                &|part| part.2.insert(0, 1),
                &|part| {
                    // Of a type as large.
                    part.1 = match part.1 {
                        Dtype::I32 => Dtype::F32,
                        Dtype::F32 => Dtype::I32,
                        Dtype::F16 => Dtype::BF16,
                        Dtype::U8 => Dtype::F8_E4M3,
                        Dtype::I8 | Dtype::F8_E4M3 => Dtype::U8,
                        other => other,
                    };
                },
                &|part| {
                    let bytes = part.3.len() / size(part);
                    (part.2, part.3) = (vec![0, 3], Vec::with_capacity(bytes));
                },
            ];
            for damage in damages {
                let mut damaged = case.clone();
                damage(&mut damaged.parts[index]);
                if read(&damaged) { num_values += 1 } else { num_errors += 1 }
            }
        }
    }
    assert!(num_values > 100 && num_errors > 100, "{num_values} values, {num_errors} errors");
}

/// An unknown format is named, with the way out.
#[test]
fn unknown_methods_are_named() {
    let bytes = vec![0_u8; 64];
    let unknown = Case {
        name: "hqq".to_owned(),
        config: json!({"quant_method": "hqq", "format": "x"}),
        parts: vec![("model.layers.0.mlp.up_proj.W_q".to_owned(), Dtype::U8, vec![8, 8], bytes)],
        golden: Vec::new(),
    };
    let error = unknown.open().unwrap().ensure_supported().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    for word in ["\"hqq\"", "W_q", "U8"] {
        assert!(error.message().contains(word), "{error} does not say {word}");
    }
    assert!(error.hint().unwrap().contains("GGUF"), "{error:?}");
}

/// Scales without quantised weights are reported, and dense tensors stay dense.
#[test]
fn activations_caches_and_dense_weights() {
    let mut case = case("w8a8");
    let stem = "model.layers.0";
    for name in ["self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", "mlp.up_proj.input_scale"] {
        case.parts.push((format!("{stem}.{name}"), Dtype::F32, vec![1], 1.0_f32.to_le_bytes().to_vec()));
    }
    let head: Vec<u8> = [1.0_f32, 2.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    case.parts.push(("lm_head.weight".to_owned(), Dtype::F32, vec![1, 2], head));
    case.parts.push(("lm_head.weight_scale".to_owned(), Dtype::F32, vec![1], 9.0_f32.to_le_bytes().to_vec()));
    let checkpoint = case.open().unwrap();
    checkpoint.ensure_supported().unwrap();
    // A separate head is also the embedding.
    assert_eq!(checkpoint.tensor_names().collect::<Vec<_>>(), ["token_embd.weight", NAME]);
    assert_eq!(checkpoint.tensor("token_embd.weight").unwrap().to_f32().unwrap(), [1.0, 2.0]);
    let notices = checkpoint.notices(false);
    for words in ["activations that are rounded", "2 scales for a cache", "1 matrix of compressed-tensors"] {
        assert_eq!(notices.iter().filter(|notice| notice.contains(words)).count(), 1, "{notices:?}");
    }
}

/// Older programs wrote a separate file, without the name of the method.
#[test]
fn older_files_have_the_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    let case = case("gptq_v2");
    write("config.json", b"{}");
    let views = case.parts.iter().map(|(name, dtype, shape, data)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    write("model.safetensors", &safetensors::serialize(views, None).unwrap());
    let mut config = case.config.clone();
    config.as_object_mut().unwrap().remove("quant_method");
    write("quantize_config.json", config.to_string().as_bytes());
    let values = Checkpoint::open(folder.path()).unwrap().tensor(NAME).unwrap().to_f32().unwrap();
    assert!(values == case.golden);
}
