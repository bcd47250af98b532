//! Interprets a `--model` argument.
//!
//! The rules, in this order:
//!
//! 1. Existing paths win: a file is a GGUF file, a folder is a model folder. So a folder that has the name of an alias
//!    or of an `org/name` hides it; `./` is never needed.
//! 2. An argument that looks like a path (`./x`, `/x`, `~x`, `x.gguf`, `a/b/c`, anything with a backslash) and does not
//!    exist is an error. It is never looked up on the Hub.
//! 3. `demo` is the model in the binary; an alias means its repository; `org/name` is a repository. `:TYPE` after a
//!    repository or an alias picks a GGUF file of that type. The address of a repository, or of a file in it, on the
//!    Hub's own site means the same.
//! 4. Any other word is an error that names the nearest aliases.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::alias::{self, ALIASES, Alias, DEMO};
use crate::{Error, ErrorKind, Result};

/// The meaning of a `--model` argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// The model that is built into the binary.
    Demo,
    /// A GGUF file on disk.
    GgufFile(PathBuf),
    /// A folder on disk.
    Folder(PathBuf),
    /// A repository on the Hub.
    Hub(HubModel),
}

/// A model on the Hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubModel {
    /// Which repository.
    pub repo: RepoId,
    /// The requested GGUF type (`Q4_K_M`) or file name; `None` for the safetensors model.
    pub gguf: Option<String>,
    /// Branch, tag or commit.
    pub revision: String,
}

impl ModelSource {
    /// Reads a `--model` argument and a `--revision` (branch, tag or commit; `main` if not given).
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for a missing path and for an unknown word, [`ErrorKind::InvalidRequest`] for an invalid
    /// name of a repository or a revision, and for a revision of an argument that has none, [`ErrorKind::Unsupported`]
    /// for a file that is not GGUF.
    pub fn parse(argument: &str, revision: Option<&str>) -> Result<Self> {
        if argument.trim().is_empty() {
            return Err(Error::invalid_request("the name of the model is empty").with_hint(HOW_TO_NAME));
        }
        let path = Path::new(argument);
        let source = if path.exists() {
            Self::from_existing_path(path)?
        } else if looks_like_path(argument) && hub_path(argument).is_none() {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no file or folder `{argument}`"))
                .with_hint("the name of a model on the Hub is org/name"));
        } else {
            Self::from_name(argument)?
        };
        match (source, revision) {
            (Self::Hub(model), Some(revision)) => {
                check_revision(revision)?;
                Ok(Self::Hub(HubModel { revision: revision.to_owned(), ..model }))
            }
            (source, None) => Ok(source),
            (_, Some(revision)) => Err(Error::invalid_request(format!(
                "revision `{revision}` is set, but `{argument}` is not a model on the Hub"
            ))
            .with_hint("leave out --revision")),
        }
    }

    fn from_existing_path(path: &Path) -> Result<Self> {
        if path.is_dir() {
            return Ok(Self::Folder(path.to_owned()));
        }
        // Other kinds of files are refused when they are opened.
        if has_gguf_extension(path) || begins_with_gguf_magic(path)? {
            return Ok(Self::GgufFile(path.to_owned()));
        }
        let error = Error::unsupported(format!("`{}` is not a GGUF file", path.display()));
        Err(match path.extension().and_then(|extension| extension.to_str()) {
            Some("safetensors" | "json") => {
                error.with_hint("give the folder that holds config.json and the .safetensors files")
            }
            _ => error.with_hint("convert the model to safetensors or GGUF"),
        })
    }

    fn from_name(argument: &str) -> Result<Self> {
        if let Some(path) = hub_path(argument) {
            return from_hub_path(argument, path).map(Self::Hub);
        }
        if let Some((_, address)) = argument.split_once("://") {
            let error = Error::invalid_request(format!("`{argument}` is an address, not a model"));
            let name: Vec<_> = address.split('/').skip(1).filter(|part| !part.is_empty()).collect();
            return Err(match &name[..] {
                _ if argument.starts_with("file://") => {
                    error.with_hint(format!("write {}", address.trim_start_matches("localhost")))
                }
                [.., file] if has_gguf_extension(Path::new(file)) => {
                    error.with_hint("download the file, and give its path")
                }
                [owner, model, ..] => {
                    error.with_hint(format!("write {owner}/{model}; another Hub is set by HF_ENDPOINT"))
                }
                _ => error.with_hint("the name of a model on the Hub is org/name"),
            });
        }
        // ollama's suffix for the default version.
        let argument = argument.strip_suffix(":latest").unwrap_or(argument);
        if argument == DEMO {
            return Ok(Self::Demo);
        }
        let of_alias = |alias: &Alias, gguf: Option<String>| {
            let repo = RepoId::parse(alias.repo)?;
            Ok(Self::Hub(HubModel { repo, gguf, revision: MAIN.to_owned() }))
        };
        if let Some(alias) = alias::find(argument) {
            return of_alias(alias, alias.gguf.map(str::to_owned));
        }
        if let Some((alias, gguf)) = alias::find_typed(argument) {
            return of_alias(alias, gguf);
        }
        let (name, gguf) = match argument.split_once(':') {
            Some((_, "")) => {
                return Err(Error::invalid_request(format!("`{argument}` has nothing after its colon"))
                    .with_hint("write org/name, or org/name:TYPE with a type such as Q4_K_M"));
            }
            Some((name, gguf)) => (name, Some(gguf.to_owned())),
            None => (argument, None),
        };
        match (alias::find(name), gguf) {
            (found, Some(tag))
                if tag.split('-').next().is_some_and(is_size)
                    && !name.contains('/')
                    && (found.is_none() || !alias::sizes(name).is_empty()) =>
            {
                Err(unknown_size(name, &tag))
            }
            (Some(alias), gguf) => of_alias(alias, gguf),
            (None, gguf) if name.contains('/') => {
                Ok(Self::Hub(HubModel { repo: RepoId::parse(name)?, gguf, revision: MAIN.to_owned() }))
            }
            (None, _) => Err(unknown_word(name)),
        }
    }
}

/// The branch that is meant where none is named.
const MAIN: &str = "main";

/// The path after the host in an address of the Hub's own site.
fn hub_path(argument: &str) -> Option<&str> {
    let address = argument.strip_prefix("https://").or_else(|| argument.strip_prefix("http://"));
    let (host, path) = address.unwrap_or(argument).split_once('/')?;
    ["hf.co", "huggingface.co", "www.huggingface.co"].contains(&host).then_some(path)
}

/// A repository, perhaps with a type, or a page of it: `org/name/tree/main`, `org/name/blob/main/file.gguf`.
fn from_hub_path(argument: &str, path: &str) -> Result<HubModel> {
    let path = path.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
    let (path, gguf) = match path.split_once(':') {
        Some((path, gguf)) => {
            (path, Some(gguf.to_owned()).filter(|gguf| !gguf.is_empty() && gguf != "latest"))
        }
        None => (path, None),
    };
    let parts: Vec<&str> = path.split('/').collect();
    let model = |org: &str, name: &str, revision: &str, gguf: Option<String>| {
        check_revision(revision)?;
        Ok(HubModel { repo: RepoId::parse(&format!("{org}/{name}"))?, gguf, revision: revision.to_owned() })
    };
    match parts[..] {
        [org, name] => model(org, name, MAIN, gguf),
        [org, name, "blob" | "raw" | "resolve", revision, ref file @ ..]
            if file.last().is_some_and(|last| has_gguf_extension(Path::new(last))) =>
        {
            model(org, name, revision, Some(file.join("/")))
        }
        [org, name, "blob" | "raw" | "resolve" | "tree", revision, ..] => model(org, name, revision, gguf),
        _ => Err(Error::invalid_request(format!("`{argument}` is not the address of a model"))
            .with_hint("write https://huggingface.co/org/name, or org/name")),
    }
}

/// Whether the text after a colon is a number of parameters, as in ollama's names.
fn is_size(tag: &str) -> bool {
    let number = tag.strip_suffix(['b', 'B', 'm', 'M']);
    number.is_some_and(|number| number.parse::<f64>().is_ok())
}

const HOW_TO_NAME: &str = "give an alias such as tinyllama, org/name, a .gguf file or a folder";

/// The checked name `org/name` of a repository. Both halves hold only letters, digits, `-`, `_` and `.`, so the name is
/// safe in a path and in an address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RepoId(String);

impl RepoId {
    /// Checks `org/name`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`] if it does not have exactly two halves, or one has a character that the Hub does
    /// not allow.
    pub fn parse(name: &str) -> Result<Self> {
        let valid_part = |part: &str| {
            !part.is_empty()
                && part.len() <= 96
                && !part.starts_with(['.', '-'])
                && !part.ends_with(['.', '-'])
                && !part.contains("--")
                && !part.contains("..")
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        };
        match name.split_once('/') {
            Some((org, model)) if valid_part(org) && valid_part(model) => Ok(Self(name.to_owned())),
            _ => Err(Error::invalid_request(format!("`{name}` cannot be the name of a model on the Hub"))
                .with_hint(HOW_TO_NAME)),
        }
    }

    /// `org/name`.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A revision becomes a path below `refs/`, so it must not lead out of there.
pub(super) fn check_revision(revision: &str) -> Result<()> {
    let valid = !revision.is_empty()
        && revision.len() <= 256
        && revision.split('/').all(|part| !part.is_empty() && !part.starts_with('.') && !part.contains(".."))
        && revision.bytes().all(|byte| byte.is_ascii_graphic() && !b"\\:*?\"<>|~^[".contains(&byte));
    if valid {
        return Ok(());
    }
    Err(Error::invalid_request(format!("`{revision}` cannot be a revision"))
        .with_hint("a revision is a branch, a tag or a commit, such as main"))
}

fn looks_like_path(argument: &str) -> bool {
    argument.starts_with(['.', '/', '~'])
        || argument.contains('\\')
        || (argument.matches('/').count() > 1 && !argument.contains("://"))
        || (has_gguf_extension(Path::new(argument)) && !argument.contains(':'))
}

fn has_gguf_extension(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// Some programs keep GGUF files under a hash as name.
fn begins_with_gguf_magic(path: &Path) -> Result<bool> {
    let reading = |source| Error::io(format_args!("cannot read `{}`", path.display()), source);
    let mut magic = Vec::with_capacity(4);
    crate::files::open(path).map_err(reading)?.take(4).read_to_end(&mut magic).map_err(reading)?;
    Ok(magic == b"GGUF")
}

fn unknown_size(name: &str, size: &str) -> Error {
    let sizes = alias::sizes(name);
    let error = Error::new(ErrorKind::NotFound, format!("no model is known as `{name}:{size}`"));
    match sizes.is_empty() {
        true => error.with_hint(unknown_word(name).hint().unwrap_or(HOW_TO_NAME).to_owned()),
        false => error.with_hint(format!(
            "did you mean {}? Any other model is written as its repository on the Hub, org/name",
            sizes.join(" or ")
        )),
    }
}

fn unknown_word(word: &str) -> Error {
    let error = Error::new(
        ErrorKind::NotFound,
        format!("`{word}` is neither an alias nor an existing file or folder"),
    );
    let near = alias::nearest(word);
    if near.is_empty() {
        let names: Vec<_> = std::iter::once(DEMO).chain(ALIASES.iter().map(|alias| alias.name)).collect();
        error.with_hint(format!(
            "the name of a model on the Hub is org/name; the aliases are {}, and ollama's names such as llama3.2 and \
             qwen3:0.6b",
            names.join(", ")
        ))
    } else {
        error.with_hint(format!("did you mean {}? A model on the Hub is written org/name", near.join(" or ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(repo: &str, gguf: Option<&str>, revision: &str) -> ModelSource {
        ModelSource::Hub(HubModel {
            repo: RepoId::parse(repo).unwrap(),
            gguf: gguf.map(str::to_owned),
            revision: revision.to_owned(),
        })
    }

    #[test]
    fn names_are_aliases_or_repositories() {
        let check = |argument: &str, revision: Option<&str>, expected: ModelSource| {
            assert_eq!(ModelSource::parse(argument, revision).unwrap(), expected, "{argument}");
        };
        check("demo", None, ModelSource::Demo);
        check("tinyllama", None, hub("TinyLlama/TinyLlama-1.1B-Chat-v1.0", None, "main"));
        check("TinyLlama", None, hub("TinyLlama/TinyLlama-1.1B-Chat-v1.0", None, "main"));
        check("qwen3-0.6b:q8_0", Some("v1"), hub("Qwen/Qwen3-0.6B", Some("q8_0"), "v1"));
        check("org/name", Some("refs/pr/1"), hub("org/name", None, "refs/pr/1"));
        check("Org/na_me-1.0:Q4_K_M", None, hub("Org/na_me-1.0", Some("Q4_K_M"), "main"));
        check("org/name:file.gguf", None, hub("org/name", Some("file.gguf"), "main"));
    }

    #[test]
    fn names_and_addresses_from_elsewhere_find_their_models() {
        let check = |argument: &str, expected: ModelSource| {
            assert_eq!(ModelSource::parse(argument, None).unwrap(), expected, "{argument}");
        };
        let small = "bartowski/Llama-3.2-1B-Instruct-GGUF";
        check("llama3.2:1b", hub(small, Some("Q4_K_M"), "main"));
        check("Llama3.2:1B", hub(small, Some("Q4_K_M"), "main"));
        check("llama3.2:latest", hub("bartowski/Llama-3.2-3B-Instruct-GGUF", Some("Q4_K_M"), "main"));
        check("llama3.2:Q8_0", hub("bartowski/Llama-3.2-3B-Instruct-GGUF", Some("Q8_0"), "main"));
        check("llama3.2:1b-instruct-q8_0", hub(small, Some("q8_0"), "main"));
        check("llama3.2:1b-instruct-fp16", hub(small, Some("f16"), "main"));
        check("llama3.2:1b-instruct", hub(small, Some("Q4_K_M"), "main"));
        check("tinyllama:latest", hub("TinyLlama/TinyLlama-1.1B-Chat-v1.0", None, "main"));
        for address in ["hf.co/org/name", "huggingface.co/org/name", "https://huggingface.co/org/name/"] {
            check(address, hub("org/name", None, "main"));
        }
        check("hf.co/org/name:Q4_K_M", hub("org/name", Some("Q4_K_M"), "main"));
        check("hf.co/org/name:latest", hub("org/name", None, "main"));
        check("https://huggingface.co/org/name/tree/v1", hub("org/name", None, "v1"));
        let file = "https://huggingface.co/org/name/resolve/main/sub/file.gguf?download=true";
        check(file, hub("org/name", Some("sub/file.gguf"), "main"));
        check("https://hf.co/org/name/blob/main/README.md", hub("org/name", None, "main"));
    }

    #[test]
    fn what_cannot_be_meant_is_an_error_with_a_way_out() {
        let check = |argument: &str, revision: Option<&str>, kind: ErrorKind, word: &str| {
            let error = ModelSource::parse(argument, revision).unwrap_err();
            assert_eq!(error.kind(), kind, "{argument}: {error:?}");
            assert!(format!("{error:?}").contains(word), "{argument}: {error:?}");
            assert!(error.hint().is_some(), "{argument}");
        };
        use ErrorKind::{InvalidRequest, NotFound};
        check("", None, InvalidRequest, "empty");
        check("./nothing-here", None, NotFound, "no file or folder `./nothing-here`");
        check("/nothing-here", None, NotFound, "no file or folder");
        check("nothing-here.gguf", None, NotFound, "no file or folder");
        check("nothing/here.GGUF", None, NotFound, "no file or folder");
        check("C:\\models\\x", None, NotFound, "no file or folder");
        check("a/b/c", None, NotFound, "no file or folder");
        check("~/models", None, NotFound, "no file or folder");
        check("tinylama", None, NotFound, "did you mean tinyllama?");
        check("tinylama:Q4_0", None, NotFound, "did you mean tinyllama?");
        check("gpt2", None, NotFound, "demo, tinyllama");
        check("org/name:", None, InvalidRequest, "after its colon");
        check("file:///models/x", None, InvalidRequest, "write /models/x");
        check("http://example.com/org/model.gguf", None, InvalidRequest, "download the file");
        check("http://example.com/org/model", None, InvalidRequest, "write org/model; another Hub");
        check("http://x", None, InvalidRequest, "org/name");
        check("org/na me", None, InvalidRequest, "cannot be the name");
        check("org/..", None, InvalidRequest, "cannot be the name");
        check("org/a--b", None, InvalidRequest, "cannot be the name");
        check("https://models.example/org/name/tree/main", None, InvalidRequest, "write org/name;");
        check("https://huggingface.co/org", None, InvalidRequest, "not the address of a model");
        check("hf.co/datasets/org/name", None, InvalidRequest, "not the address of a model");
        check("llama3.2:2b", None, NotFound, "llama3.2:1b or llama3.2:3b");
        check("llama3.3:70b", None, NotFound, "did you mean llama3");
        check("llama3.2:1b-text-q8_0", None, NotFound, "did you mean");
        check("org/name", Some("../../x"), InvalidRequest, "cannot be a revision");
        check("org/name", Some(""), InvalidRequest, "cannot be a revision");
        check("demo", Some("main"), InvalidRequest, "--revision");
    }

    #[test]
    fn what_exists_on_disk_wins() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let parse = |path: &Path| ModelSource::parse(path.to_str().unwrap(), None);
        std::fs::write(at("model.gguf"), b"anything").unwrap();
        std::fs::write(at("sha256-abc"), b"GGUF\x03\0\0\0").unwrap();
        std::fs::write(at("model.safetensors"), b"x").unwrap();
        std::fs::write(at("short"), b"GG").unwrap();

        assert_eq!(parse(folder.path()).unwrap(), ModelSource::Folder(folder.path().to_owned()));
        assert_eq!(parse(&at("model.gguf")).unwrap(), ModelSource::GgufFile(at("model.gguf")));
        assert_eq!(parse(&at("sha256-abc")).unwrap(), ModelSource::GgufFile(at("sha256-abc")));
        let error = parse(&at("model.safetensors")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.hint().unwrap().contains("folder"));
        assert_eq!(parse(&at("short")).unwrap_err().kind(), ErrorKind::Unsupported);

        // The tests run in the package's folder, where `src` and `src/hub` exist.
        assert_eq!(ModelSource::parse("src", None).unwrap(), ModelSource::Folder("src".into()));
        assert_eq!(ModelSource::parse("src/hub", None).unwrap(), ModelSource::Folder("src/hub".into()));
        assert!(ModelSource::parse("src", Some("main")).is_err());
    }
}
