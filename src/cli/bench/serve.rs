//! `tinyvllm bench serve`: puts load on a running server and measures it.
//!
//! It measures any server with OpenAI's interface and uses nothing that only this program has. [`workload`]
//! and [`vocabulary`] make the prompts, [`arrivals`] the times, [`load`] and [`request`] send them, and
//! [`summary`] computes the results.

mod args;
mod arrivals;
mod load;
mod random;
mod report;
mod request;
mod sse;
mod statistics;
mod summary;
mod vocabulary;
mod workload;

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};
use tinyvllm::{Error, ErrorKind};

pub(crate) use self::args::ServeBenchArgs;
use self::args::{Backend, DatasetName, WorkloadArgs};
use self::arrivals::Arrivals;
use self::load::{Load, Run};
use self::random::Random;
use self::report::{Report, Setup};
use self::request::{Api, Template};
use self::summary::Summary;
use self::vocabulary::Vocabulary;
use self::workload::{Dataset, Sample};
use crate::console::Console;
use crate::http::{HttpClient, read_success};
use crate::interrupt;

/// Size limit of the answer of `/v1/models`.
const MAX_MODELS_BYTES: usize = 1 << 20;
/// Interval of checking whether the server is ready.
const READY_INTERVAL: Duration = Duration::from_millis(500);

/// Sends requests, measures and prints.
///
/// # Errors
/// If the server cannot be reached, the workload cannot be made, or the result cannot be written.
pub(crate) fn run(args: &ServeBenchArgs) -> anyhow::Result<ExitCode> {
    let console = Console::new(args.messages);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the client")?.block_on(measure(args, console))
}

async fn measure(args: &ServeBenchArgs, console: Console) -> anyhow::Result<ExitCode> {
    let target = Target::new(args)?;
    let served = target.wait_for_model(args).await?;
    let (samples, tokenizer) = target.samples(args, &served, console).await?;
    let model = served.name;
    let template = Template {
        api: target.api,
        model: model.clone(),
        ignore_eos: args.sampling.ignore_eos.unwrap_or(args.workload.dataset_name == DatasetName::Random),
        extra: extra_parameters(args),
    };
    let bodies: Vec<_> = samples.iter().map(|sample| template.body(sample)).collect();
    drop(samples);

    let traffic = &args.traffic;
    let warmup = Load {
        client: target.client.clone(),
        api: target.api,
        path: target.path.clone(),
        bodies: bodies.iter().take(1).cycle().take(traffic.num_warmups).cloned().collect(),
        times: vec![Duration::ZERO; traffic.num_warmups],
        max_concurrency: traffic.max_concurrency,
        timeout: traffic.request_timeout,
    };
    if traffic.num_warmups > 0 {
        console.detail(format_args!("warming up with {} requests", traffic.num_warmups));
        if warm_up(warmup, console).await {
            return Ok(ExitCode::from(interrupt::EXIT_CODE));
        }
    }

    let arrivals = Arrivals { rate: traffic.request_rate, burstiness: traffic.burstiness };
    // A random stream of its own: a seed gives the same times for all prompts.
    let mut random = Random::new(args.workload.seed ^ 0x5851_f42d_4c95_7f2d);
    let setup = Setup {
        backend: target.backend,
        model,
        tokenizer,
        num_prompts: bodies.len(),
        request_rate: traffic.request_rate,
        burstiness: traffic.burstiness,
        max_concurrency: traffic.max_concurrency,
        metrics: args.result.percentile_metrics.clone(),
        percentiles: args.result.metric_percentiles.clone(),
        metadata: args.result.metadata.clone(),
        time: SystemTime::now(),
    };
    console.detail(format_args!("sending {} requests to {}", bodies.len(), target.client.base_url()));
    let times = arrivals.times(bodies.len(), &mut random);
    let load = Load {
        client: target.client,
        api: target.api,
        path: target.path,
        bodies,
        times,
        max_concurrency: traffic.max_concurrency,
        timeout: traffic.request_timeout,
    };
    let run = run_with_bar(load, args.result.disable_tqdm || console.is_quiet()).await;
    let summary = Summary::of(&run, args.result.service_levels());
    finish(args, &Report { setup: &setup, summary: &summary, run: &run }, console)
}

/// Prints and writes the result.
fn finish(args: &ServeBenchArgs, report: &Report<'_>, console: Console) -> anyhow::Result<ExitCode> {
    let Report { summary, run, .. } = *report;
    let result = report.json(args.result.save_detailed);
    let mut output = io::stdout().lock();
    match args.result.json {
        true => writeln!(output, "{result}")?,
        false => write!(output, "{report}")?,
    }
    output.flush()?;
    for error in report.errors() {
        console.reply(format_args!("failed: {error}"));
    }
    if summary.num_without_usage > 0 {
        console.note(format_args!(
            "the server did not count the tokens of {} answers; each event counts as one token there",
            summary.num_without_usage
        ));
    }
    if args.result.save_result {
        let mut path = args.result.result_dir.clone().unwrap_or_default();
        if !path.as_os_str().is_empty() {
            std::fs::create_dir_all(&path)
                .map_err(|source| Error::io(format_args!("cannot create {}", path.display()), source))?;
        }
        path.push(args.result.result_filename.clone().unwrap_or_else(|| report.file_name()));
        save(&path, &result)?;
        console.note(format_args!("saved {}", path.display()));
    }
    Ok(match (run.is_interrupted, summary.completed) {
        (true, _) => ExitCode::from(interrupt::EXIT_CODE),
        (false, 0) => ExitCode::FAILURE,
        (false, _) => ExitCode::SUCCESS,
    })
}

fn save(path: &PathBuf, result: &Value) -> anyhow::Result<()> {
    std::fs::write(path, format!("{result}\n"))
        .map_err(|source| Error::io(format_args!("cannot write {}", path.display()), source).into())
}

/// Sends requests that are not measured. Returns whether Ctrl-C ended them.
async fn warm_up(load: Load, console: Console) -> bool {
    let run = load.run(|_| ()).await;
    if let Some(error) = run.outcomes.iter().find_map(|outcome| outcome.error.as_ref()) {
        console.note(format_args!("a warm-up request failed: {error}"));
    }
    run.is_interrupted
}

async fn run_with_bar(load: Load, is_silent: bool) -> Run {
    let bar = match is_silent || !io::stderr().is_terminal() {
        true => ProgressBar::hidden(),
        false => ProgressBar::new(load.bodies.len() as u64),
    };
    let template = "{pos}/{len} [{bar:30}] {elapsed} {per_sec} {eta}{msg}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    let mut num_failed = 0;
    let run = load
        .run(|outcome| {
            if outcome.error.is_some() {
                num_failed += 1;
                bar.set_message(format!(" · {num_failed} failed"));
            }
            bar.inc(1);
        })
        .await;
    bar.finish_and_clear();
    run
}

/// A model in the server's list.
#[derive(Debug)]
struct ServedModel {
    name: String,
    /// Its longest context, if the list says so.
    max_len: Option<usize>,
}

/// The server, the interface and the model.
#[derive(Debug)]
struct Target {
    client: HttpClient,
    backend: Backend,
    api: Api,
    path: String,
}

impl Target {
    fn new(args: &ServeBenchArgs) -> anyhow::Result<Self> {
        let server = &args.server;
        let base_url = server.base_url.clone().unwrap_or_else(|| {
            let host = &server.host;
            let brackets = host.contains(':') && !host.starts_with('[');
            let host = if brackets { format!("[{host}]") } else { host.clone() };
            format!("http://{host}:{}", server.port)
        });
        let is_chat = |path: &String| path.trim_end_matches('/').ends_with("chat/completions");
        let by_path = server.endpoint.as_ref().map(|path| match is_chat(path) {
            true => Backend::OpenaiChat,
            false => Backend::Openai,
        });
        let backend = server.backend.or(by_path).unwrap_or(Backend::Openai);
        let (api, default_path) = match backend {
            Backend::Openai => (Api::Completions, "/v1/completions"),
            Backend::OpenaiChat => (Api::Chat, "/v1/chat/completions"),
        };
        let path = server.endpoint.clone().unwrap_or_else(|| default_path.to_owned());
        let path = if path.starts_with('/') { path } else { format!("/{path}") };
        if by_path.is_some_and(|by_path| by_path != backend) {
            let message = format!("--backend {} does not support --endpoint {path}", backend.name());
            return Err(Error::invalid_request(message).with_hint("leave one of them out").into());
        }
        let key = server.api_key.clone().or_else(|| std::env::var("OPENAI_API_KEY").ok());
        let client = HttpClient::new(&base_url, key.as_deref().filter(|key| !key.is_empty()))?;
        Ok(Self { client, backend, api, path })
    }

    /// The model to request. Waits for the server within the timeout.
    async fn wait_for_model(&self, args: &ServeBenchArgs) -> anyhow::Result<ServedModel> {
        let deadline = Instant::now() + args.server.ready_check_timeout_sec;
        loop {
            let wanted = args.server.model.as_deref();
            let error = match (self.served_model(wanted).await, wanted) {
                (Ok(served), _) => return Ok(served),
                // With --model, the list is not needed, and some servers have none.
                (Err(_), Some(name)) if args.server.ready_check_timeout_sec.is_zero() => {
                    return Ok(ServedModel { name: name.to_owned(), max_len: None });
                }
                (Err(error), _) => error,
            };
            if Instant::now() >= deadline {
                let message = format!("cannot list the models of {}: {error:#}", self.client.base_url());
                let hint = "give the server's address with --base-url, or its model with --model";
                return Err(Error::new(ErrorKind::Unavailable, message).with_hint(hint).into());
            }
            tokio::time::sleep(READY_INTERVAL).await;
        }
    }

    /// The model with this name, or the first one in the list.
    async fn served_model(&self, wanted: Option<&str>) -> anyhow::Result<ServedModel> {
        let body = read_success(self.client.get("/v1/models").await?, MAX_MODELS_BYTES).await?;
        let answer: Value = serde_json::from_slice(&body).context("the answer is not JSON")?;
        let list = answer["data"].as_array().filter(|list| !list.is_empty()).context("the list is empty")?;
        let listed = match wanted {
            Some(name) => list.iter().find(|model| model["id"] == name),
            None => list.first(),
        };
        let name = wanted.or_else(|| listed?["id"].as_str()).context("the first model has no id")?;
        let max_len = listed.and_then(|model| model["max_model_len"].as_u64());
        Ok(ServedModel { name: name.to_owned(), max_len: max_len.and_then(|len| usize::try_from(len).ok()) })
    }

    /// The requests to send, and the tokenizer that determined their lengths.
    async fn samples(
        &self,
        args: &ServeBenchArgs,
        served: &ServedModel,
        console: Console,
    ) -> anyhow::Result<(Vec<Sample>, Option<String>)> {
        let model = &served.name[..];
        let workload = &args.workload;
        let num_prompts = workload.num_prompts;
        let output_len = |own: usize| workload.output_len.unwrap_or(own);
        let dataset = match (workload.dataset_name, &workload.dataset_path) {
            (DatasetName::Custom, Some(path)) => {
                let output_len = output_len(workload.custom_output_len);
                let allow_ids = self.api == Api::Completions;
                return Ok((workload::read_file(path, num_prompts, output_len, allow_ids)?, None));
            }
            (DatasetName::Custom, None) => {
                let message = "--dataset-name custom needs --dataset-path";
                return Err(Error::invalid_request(message).into());
            }
            (_, Some(path)) => {
                let message = format!("--dataset-path {} is for --dataset-name custom", path.display());
                return Err(Error::invalid_request(message).into());
            }
            (DatasetName::Random, None) => Dataset::Random {
                prefix_len: workload.random_prefix_len,
                input_len: workload
                    .input_len
                    .or(workload.random_input_len)
                    .unwrap_or_else(|| usual_input_len(workload, served.max_len, console)),
                output_len: output_len(workload.random_output_len),
                range_ratio: workload.random_range_ratio,
            },
            (DatasetName::PrefixRepetition, None) => Dataset::PrefixRepetition {
                prefix_len: workload.prefix_repetition_prefix_len,
                suffix_len: workload.input_len.unwrap_or(workload.prefix_repetition_suffix_len),
                num_prefixes: workload.prefix_repetition_num_prefixes,
                output_len: output_len(workload.prefix_repetition_output_len),
            },
        };
        dataset.check(num_prompts)?;
        let found = Vocabulary::find(&self.client, self.api, model, workload.vocab_size).await;
        if !found.is_exact {
            console.note(
                "the server's tokenizer cannot be used, so prompts are words and their lengths are approximate; \
                 results count the tokens that the server reports",
            );
        }
        let samples = dataset.samples(num_prompts, &found.vocabulary, &mut Random::new(workload.seed));
        Ok((samples, found.by_server.then(|| model.to_owned())))
    }
}

/// Tokens of a random prompt: as many as usual, or as the context leaves.
fn usual_input_len(workload: &WorkloadArgs, max_len: Option<usize>, console: Console) -> usize {
    const USUAL: usize = 1_024;
    let longest = 1.0 + workload.random_range_ratio;
    let output_len = workload.output_len.unwrap_or(workload.random_output_len) as f64 * longest;
    let taken = workload.random_prefix_len.saturating_add(output_len.ceil() as usize);
    let left = max_len.map_or(USUAL, |max_len| (max_len.saturating_sub(taken) as f64 / longest) as usize);
    if left < USUAL {
        console.note(format_args!(
            "prompts have {} tokens instead of {USUAL}: the server's context has {}",
            left.max(1),
            max_len.unwrap_or_default()
        ));
    }
    left.clamp(1, USUAL)
}

fn extra_parameters(args: &ServeBenchArgs) -> Map<String, Value> {
    let sampling = &args.sampling;
    let given = [
        ("temperature", sampling.temperature.map(|value| json!(value))),
        ("top_p", sampling.top_p.map(|value| json!(value))),
        ("top_k", sampling.top_k.map(|value| json!(value))),
    ];
    let given = given.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    given.chain(sampling.extra_body.clone().unwrap_or_default()).collect()
}
