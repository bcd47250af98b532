//! Requests for hidden states: the same bits however they are scheduled, and embeddings of texts.

use tinyvllm::engine::Wanted;

use super::*;

/// The state that a request ends with.
fn state(events: impl Iterator<Item = Event>) -> Vec<f32> {
    let mut state = None;
    for event in events {
        match event {
            Event::Hidden { values } => assert!(state.replace(values).is_none(), "two states"),
            Event::Finished { reason, error, stats, .. } => {
                assert_eq!((reason, error), (FinishReason::Length, None));
                assert_eq!(stats.num_output_tokens, 0);
            }
            other => panic!("{other:?}"),
        }
    }
    state.unwrap()
}

fn prompts(llm: &Llm) -> Vec<Vec<u32>> {
    let mut prompts: Vec<Vec<u32>> =
        requests(llm).into_iter().map(|request| request.prompt_token_ids).collect();
    // Equal up to the last token.
    let mut last = prompts[0].clone();
    *last.last_mut().unwrap() += 1;
    prompts.push(last);
    prompts
}

#[test]
fn states_have_the_same_bits_however_they_are_scheduled() {
    let plain = load(&with_limits(|limits| limits.enable_prefix_caching = false));
    let run = |llm: &Llm, prompt: &Vec<u32>| {
        state(llm.engine().submit(Request::hidden_state(prompt.clone())).unwrap())
    };
    let prompts = prompts(&plain);
    let expected: Vec<_> = prompts.iter().map(|prompt| run(&plain, prompt)).collect();
    assert_eq!(expected[0].len(), plain.model_config().hidden_size);
    for (index, one) in expected.iter().enumerate() {
        assert!(expected[..index].iter().all(|other| other != one), "states {index} and before");
    }
    let tokens_alone = alone(&plain);
    for (max_num_batched_tokens, max_num_seqs) in [(512, 16), (16, 16), (24, 2)] {
        let llm = load(&with_limits(|limits| {
            limits.max_num_batched_tokens = Some(max_num_batched_tokens);
            limits.max_num_seqs = max_num_seqs;
        }));
        // Again, from the prefix cache.
        for _ in 0..2 {
            let submit = |request: Request| llm.engine().submit(request).unwrap();
            let mut streams = Vec::new();
            let mut generated = requests(&llm).into_iter();
            for prompt in &prompts {
                streams.push(submit(Request::hidden_state(prompt.clone())));
                streams.extend(generated.next().map(submit));
            }
            let mut streams = streams.into_iter();
            for (index, expected) in expected.iter().enumerate() {
                assert!(state(streams.next().unwrap()) == *expected, "{max_num_batched_tokens}: {index}");
                if let Some(alone) = tokens_alone.get(index) {
                    let n = alone.tokens.len();
                    assert_eq!(collect(streams.next().unwrap(), n).tokens, alone.tokens);
                }
            }
        }
    }
}

#[test]
fn embeddings_are_the_states_of_texts_with_length_one() {
    let llm = load(&with_limits(|limits| limits.max_num_seqs = 2));
    let texts = ["Once upon a time", "The fox", "Once upon a time", "A paged cache is a way to"];
    let embeddings = llm.embed(&texts).unwrap();
    assert_eq!(embeddings.len(), texts.len());
    assert!(embeddings[0] == embeddings[2] && embeddings[0] != embeddings[1]);
    for (text, embedding) in texts.iter().zip(&embeddings) {
        let request = Request::hidden_state(llm.encode_raw(text).unwrap());
        let state = state(llm.engine().submit(request).unwrap());
        let length = state.iter().map(|value| value * value).sum::<f32>().sqrt();
        for (value, own) in state.iter().zip(embedding) {
            assert!((value / length - own).abs() < 1e-6, "{text}");
        }
    }
    assert_eq!(llm.embed(&[]).unwrap(), Vec::<Vec<f32>>::new());
}

#[test]
fn a_request_for_a_state_generates_nothing() {
    let llm = load(&with_limits(|_| ()));
    let request = |change: &dyn Fn(&mut Request)| {
        let mut request = Request::hidden_state(vec![1, 2, 3]);
        change(&mut request);
        llm.engine().submit(request).err().unwrap().message().to_owned()
    };
    assert!(request(&|request| request.params.n = 2).ends_with("and has n"));
    assert!(request(&|request| request.prompt_logits = true).ends_with("and has prompt_logits"));
    assert!(request(&|request| request.prompt_logprobs = Some(1)).ends_with("and has prompt_logprobs"));
    assert!(request(&|request| request.params.logprobs = Some(1)).ends_with("and has logprobs"));
    assert_eq!(Request::default().wanted, Wanted::Logits);
}
