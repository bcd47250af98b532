//! Hidden states after the last norm, wanted of positions instead of logits.

use super::*;

/// The head of a folder, or its embedding if that is the head: `[vocab_size, hidden_size]`.
fn head(model: &str) -> Vec<Vec<f64>> {
    let bytes = std::fs::read(fixture(model).join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor("lm_head.weight").or_else(|_| file.tensor("model.embed_tokens.weight")).unwrap();
    let values: Vec<f64> = match tensor.dtype() {
        safetensors::Dtype::F32 => {
            tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes).into()).collect()
        }
        safetensors::Dtype::F16 => {
            tensor.data().as_chunks().0.iter().map(|bytes| half::f16::from_le_bytes(*bytes).into()).collect()
        }
        other => panic!("a head in {other:?}"),
    };
    values.chunks(tensor.shape()[1]).map(<[f64]>::to_vec).collect()
}

/// A step of these rows, and what is wanted of the last token of each. The bits of all logits and states.
fn step(instance: &mut Instance, rows: &[(usize, &[u32], usize, Wanted)]) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let own: Vec<_> = rows.iter().map(|(sequence, tokens, num, _)| (*sequence, *tokens, *num)).collect();
    let mut batch = instance.batch(&own);
    let mut end = 0;
    for (_, _, num, wanted) in rows {
        end += num;
        batch.want(end - 1, *wanted);
    }
    let config = instance.model.config().clone();
    let logits = instance.model.forward(&batch, &mut instance.cache).unwrap();
    let split = |values: &[f32], width: usize| values.chunks(width).map(<[f32]>::to_vec).collect::<Vec<_>>();
    let logits = logits.read(batch.num_logits(), |logits| split(logits, config.vocab_size)).unwrap();
    (logits, split(&instance.model.hidden_states(&batch).unwrap(), config.hidden_size))
}

/// The head of each state is the logits that transformers computed. There are more of them than values of a state, so the
/// states are its states.
#[test]
fn states_are_those_whose_head_is_the_logits() {
    for model in ["llama", "qwen3", "granite", "gemma3", "gpt_oss", "deepseek_v2_lite"] {
        let model = &format!("tiny/{model}");
        let golden = Golden::read(&format!("{model}/golden.safetensors"));
        let head = head(model);
        for kernels in Kernels::all() {
            let mut instance = Instance::open(model, Setup { kernels, ..Setup::default() });
            let mut batch = instance.batch(&[(0, &golden.ids, golden.ids.len())]);
            (0..golden.ids.len()).for_each(|index| batch.want(index, Wanted::Hidden));
            instance.model.forward(&batch, &mut instance.cache).unwrap();
            let states = instance.model.hidden_states(&batch).unwrap();
            let scale = f64::from(instance.model.config().logits_scale);
            let states: Vec<&[f32]> = states.chunks(head[0].len()).collect();
            let logits_of = |state: &&[f32]| -> Vec<f32> {
                let product = |row: &Vec<f64>| -> f64 {
                    row.iter().zip(*state).map(|(weight, value)| weight * f64::from(*value)).sum()
                };
                head.iter().map(|row| (scale * product(row)) as f32).collect()
            };
            let logits: Vec<_> = states.iter().map(logits_of).collect();
            let (max, _, _) = compare(&logits, &golden.logits);
            assert!(max < 1e-3, "{model} with {kernels:?}: logits differ by {max}");
        }
    }
}

#[test]
fn states_have_the_same_bits_in_chunks_and_alongside_others() {
    for model in MODELS {
        let tokens = Golden::read("tiny/llama/golden.safetensors").ids;
        let (tokens, others) = (&tokens[..20], &tokens[8..30]);
        let open = || Instance::open(model, Setup::default());
        let (_, alone) = step(&mut open(), &[(0, tokens, tokens.len(), Wanted::Hidden)]);
        let (logits_alone, _) = step(&mut open(), &[(1, others, others.len(), Wanted::Logits)]);
        assert!(alone.len() == 1 && alone[0].iter().any(|value| *value != 0.0));

        let mut instance = open();
        instance.step(&[(0, &tokens[..13], 13)]);
        let (_, in_chunks) = step(&mut instance, &[(0, tokens, 7, Wanted::Hidden)]);
        assert!(in_chunks == alone, "{model} in chunks");

        let mut instance = open();
        let rows = [
            (1, others, others.len(), Wanted::Logits),
            (0, tokens, tokens.len(), Wanted::Hidden),
            (2, &others[..9], 9, Wanted::Hidden),
        ];
        let (logits, states) = step(&mut instance, &rows);
        assert!(states.len() == 2 && states[0] == alone[0] && states[1] != alone[0], "{model}");
        assert!(logits == logits_alone, "{model}: logits alongside states");
    }
}

/// The rows of logits after the wanted ones are those of the step before.
#[test]
fn the_head_is_for_positions_that_want_logits() {
    let mut instance = Instance::open("tiny/llama", Setup::default());
    let (one, other) = ([5, 6, 7], [9, 8]);
    let (before, _) = step(&mut instance, &[(0, &one, 3, Wanted::Logits), (1, &other, 2, Wanted::Logits)]);
    let mut batch = instance.batch(&[(0, &other, 2), (1, &one, 3)]);
    batch.want(1, Wanted::Logits);
    batch.want(4, Wanted::Hidden);
    let logits = instance.model.forward(&batch, &mut instance.cache).unwrap();
    let vocab_size = before[0].len();
    let after: Vec<Vec<f32>> =
        logits.read(2, |logits| logits.chunks(vocab_size).map(<[f32]>::to_vec).collect()).unwrap();
    assert!(after[0] == before[1] && after[1] == before[1]);
}
