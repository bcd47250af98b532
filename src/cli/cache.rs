//! Prefixes in files: their flags, and `tinyvllm cache`.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::SystemTime;

use clap::{Args, Subcommand};
use tinyvllm::Error;
use tinyvllm::llm::OffloadOptions;
use tinyvllm::prefix_store::{
    DirectoryReport, PackContents, PackReport, StoreOptions, clear_directory, inspect_directory,
};

use super::console::Console;
use super::flags::MessageArgs;
use super::table;
use super::value::{human_age, human_bytes};

/// Size limit of a folder in GB, without `--prefix-cache-gb`.
const DEFAULT_GB: f64 = 10.0;

/// Where prefixes are stored outside the KV cache.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct PrefixStoreArgs {
    /// Keep computed prefixes in this folder, so that a restart finds them; several processes may share it
    #[arg(long, value_name = "FOLDER", hide_short_help = true)]
    prefix_cache_dir: Option<PathBuf>,
    /// Size limit of that folder in GB; the least recently used prefixes are removed first [default: 10]
    #[arg(long, value_name = "N", hide_short_help = true)]
    prefix_cache_gb: Option<f64>,
    /// Host memory for blocks of the KV cache that do not fit on a GPU, in GB
    #[arg(long, value_name = "N", hide_short_help = true)]
    kv_offload_gb: Option<f64>,
}

impl PrefixStoreArgs {
    /// The flag for host memory as the library's type.
    ///
    /// # Errors
    /// If it is not a valid size.
    pub(crate) fn offload(&self, console: Console) -> anyhow::Result<Option<OffloadOptions>> {
        let Some(gb) = self.kv_offload_gb else { return Ok(None) };
        if !(0.001..=1e6).contains(&gb) {
            return Err(Error::invalid_request(format!(
                "--kv-offload-gb is {gb}; it must be at least 0.001 and at most 1000000"
            ))
            .into());
        }
        let on_notice = Arc::new(move |line: &str| console.note(line));
        Ok(Some(OffloadOptions { max_bytes: (gb * 1e9) as u64, on_notice }))
    }

    /// These flags as the library's type; `None` without a folder.
    ///
    /// # Errors
    /// If there is a limit and no folder, or the limit is not a valid size.
    pub(crate) fn options(&self, console: Console) -> anyhow::Result<Option<StoreOptions>> {
        let Some(directory) = &self.prefix_cache_dir else {
            return match self.prefix_cache_gb {
                None => Ok(None),
                Some(gb) => {
                    Err(Error::invalid_request(format!("--prefix-cache-gb {gb} has no folder to limit"))
                        .with_hint("name one with --prefix-cache-dir")
                        .into())
                }
            };
        };
        let gb = self.prefix_cache_gb.unwrap_or(DEFAULT_GB);
        if !(0.001..=1e9).contains(&gb) {
            return Err(Error::invalid_request(format!(
                "--prefix-cache-gb is {gb}; it must be at least 0.001 and at most 1000000000"
            ))
            .into());
        }
        Ok(Some(StoreOptions {
            directory: directory.clone(),
            max_bytes: (gb * 1e9) as u64,
            reads_always: false,
            on_notice: Arc::new(move |line| console.note(line)),
        }))
    }
}

/// The command for a folder of `--prefix-cache-dir`. Servers may be using it.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum CacheCommand {
    /// List its packs, least recently used first
    Ls(CacheArgs),
    /// Show its size
    Du(CacheArgs),
    /// Read every block and compare its checksum
    Verify(CacheArgs),
    /// Remove everything in it except its secret
    Clear(CacheArgs),
}

/// The folder of a command.
#[derive(Debug, Clone, Args)]
pub(crate) struct CacheArgs {
    /// The folder
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    #[command(flatten)]
    messages: MessageArgs,
}

/// Runs the command.
///
/// # Errors
/// If the folder does not contain cached prefixes, or cannot be read or changed.
pub(crate) fn run(command: &CacheCommand) -> anyhow::Result<ExitCode> {
    let mut out = io::stdout().lock();
    match command {
        CacheCommand::Ls(args) => {
            let report = inspect_directory(&args.folder, false)?;
            let rows: Vec<_> = report.packs.iter().map(row).collect();
            for line in table::lines(["PACK", "SIZE", "USED", "MODEL", "BLOCKS"], &rows) {
                writeln!(out, "{line}")?;
            }
        }
        CacheCommand::Du(args) => {
            let report = inspect_directory(&args.folder, false)?;
            writeln!(
                out,
                "{} in {} files; {} packs with {} tokens",
                human_bytes(report.num_bytes),
                report.num_files,
                report.packs.len(),
                num_tokens(&report)
            )?;
        }
        CacheCommand::Verify(args) => {
            let report = inspect_directory(&args.folder, true)?;
            let mut num_damaged = 0;
            for pack in &report.packs {
                if let Err(fault) = &pack.contents {
                    num_damaged += 1;
                    writeln!(out, "{}: {fault}", pack.path.display())?;
                }
            }
            let num_packs = report.packs.len();
            writeln!(out, "{} of {num_packs} packs are intact", num_packs - num_damaged)?;
            if num_damaged > 0 {
                return Ok(ExitCode::FAILURE);
            }
        }
        CacheCommand::Clear(args) => {
            let (num_files, num_bytes) = clear_directory(&args.folder)?;
            Console::new(args.messages)
                .note(format_args!("removed {num_files} files, {}", human_bytes(num_bytes)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn row(pack: &PackReport) -> [String; 5] {
    let name = pack.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let age = SystemTime::now().duration_since(pack.used).unwrap_or_default();
    let (model, blocks) = match &pack.contents {
        Ok(PackContents { fingerprint, num_blocks, block_size, num_salted }) => {
            let salted = if *num_salted > 0 { format!(", {num_salted} with a salt") } else { String::new() };
            (fingerprint.clone(), format!("{num_blocks} of {block_size} tokens{salted}"))
        }
        Err(fault) => ("-".to_owned(), fault.clone()),
    };
    [name, human_bytes(pack.num_bytes).to_string(), format!("{} ago", human_age(age)), model, blocks]
}

fn num_tokens(report: &DirectoryReport) -> usize {
    let contents = report.packs.iter().filter_map(|pack| pack.contents.as_ref().ok());
    contents.map(|pack| pack.num_blocks * pack.block_size).sum()
}
