//! Everything the hub code takes from its surroundings: addresses, token, folders, timeouts.
//!
//! No other file of this module reads an environment variable, so a test (or a program that embeds
//! the library) decides all of it by filling in a [`HubConfig`].

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::{Error, ErrorKind, Result};

/// Bytes of a file with a token.
const MAX_TOKEN_BYTES: u64 = 64 << 10;

/// Where models come from and where they are kept.
#[derive(Debug, Clone)]
pub struct HubConfig {
    /// Base address of the Hub or of a mirror: `HF_ENDPOINT`, by default `https://huggingface.co`.
    pub endpoint: String,
    /// The access token. It is sent to the host of `endpoint` and to no other.
    pub token: Option<Token>,
    /// The folder that holds `models--org--name`, shared with the Python libraries.
    pub cache_dir: PathBuf,
    /// Never touch the network (`HF_HUB_OFFLINE=1`).
    pub offline: bool,
    /// Go through the proxy of `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`.
    pub proxy_from_env: bool,
    /// Maximum wait for a name lookup and, separately, for a connection.
    pub connect_timeout: Duration,
    /// Longest silence of a server, before its answer and within it.
    pub read_timeout: Duration,
    /// Maximum connections that fetch ranges of one file at once.
    pub max_connections: usize,
    /// Maximum bytes of a file in one request. Up to twice this is held in memory for each connection.
    pub max_range_bytes: u64,
    /// How often a request that failed on the way (not one that was refused) is tried again. Within
    /// a file the count restarts whenever bytes have arrived.
    pub num_retries: u32,
    /// Wait before the first retry; it doubles with each further one.
    pub retry_delay: Duration,
    /// The wait for another process that holds a file's lock but makes no progress. Without locks, a file that was not
    /// written to for so long counts as left by a dead process, so it must be longer than `read_timeout` with all
    /// retries.
    pub lock_timeout: Duration,
}

impl HubConfig {
    /// The public Hub without a token, with files kept in `cache_dir`.
    #[must_use]
    pub fn new(cache_dir: impl Into<PathBuf>) -> Self {
        Self {
            endpoint: "https://huggingface.co".to_owned(),
            token: None,
            cache_dir: cache_dir.into(),
            offline: false,
            proxy_from_env: false,
            connect_timeout: Duration::from_secs(10),
            read_timeout: Duration::from_secs(30),
            max_connections: 8,
            max_range_bytes: 8 << 20,
            num_retries: 4,
            retry_delay: Duration::from_millis(500),
            lock_timeout: Duration::from_secs(300),
        }
    }

    /// Reads `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`
    /// (and `XDG_CACHE_HOME`, `HUGGINGFACE_HUB_CACHE`, `TRANSFORMERS_OFFLINE`) as the Python libraries
    /// do, and the token that `hf auth login` left in `$HF_HOME/token`.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is neither one of the folder variables nor a home folder.
    pub fn from_env() -> Result<Self> {
        let mut config = Self::from_variables(|name| std::env::var_os(name), std::env::home_dir())?;
        config.proxy_from_env = true;
        Ok(config)
    }

    fn from_variables(
        variable: impl Fn(&str) -> Option<OsString>,
        home_dir: Option<PathBuf>,
    ) -> Result<Self> {
        // An empty variable counts as unset: that is how a shell script switches one off.
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| variable(name).and_then(|value| value.into_string().ok());
        let folder = |name: &str| variable(name).map(PathBuf::from);

        let hf_home = folder("HF_HOME")
            .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")))
            .or_else(|| home_dir.map(|home| home.join(".cache").join("huggingface")));
        let cache_dir = folder("HF_HUB_CACHE")
            .or_else(|| folder("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| hf_home.as_ref().map(|home| home.join("hub")))
            .ok_or_else(|| {
                Error::new(ErrorKind::NotFound, "there is no home folder for downloaded models")
                    .with_hint("set HF_HOME to a folder")
            })?;
        let token_path = folder("HF_TOKEN_PATH").or_else(|| hf_home.map(|home| home.join("token")));

        let mut config = Self::new(cache_dir);
        if let Some(endpoint) = text("HF_ENDPOINT") {
            config.endpoint = endpoint;
        }
        config.offline =
            text("HF_HUB_OFFLINE").or_else(|| text("TRANSFORMERS_OFFLINE")).is_some_and(|v| is_true(&v));
        config.token = text("HF_TOKEN").and_then(|value| Token::new(&value, "HF_TOKEN")).or_else(|| {
            let path = token_path?;
            Token::new(&crate::files::read_any_text(&path, MAX_TOKEN_BYTES).ok()?, path.display())
        });
        Ok(config)
    }
}

fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].iter().any(|word| word.eq_ignore_ascii_case(value))
}

/// An access token. Neither `Debug` nor any message shows its text.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    secret: String,
    origin: String,
}

impl Token {
    /// A token and the name of its source, which messages show instead. `None` if it is only white space.
    #[must_use]
    pub fn new(secret: &str, origin: impl fmt::Display) -> Option<Self> {
        let secret = secret.trim();
        (!secret.is_empty()).then(|| Self { secret: secret.to_owned(), origin: origin.to_string() })
    }

    /// Where the token came from: `HF_TOKEN` or a file.
    #[must_use]
    pub fn origin(&self) -> &str {
        &self.origin
    }

    #[cfg(any(test, feature = "hub"))]
    pub(super) fn secret(&self) -> &str {
        &self.secret
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(from {})", self.origin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)], home: Option<&str>) -> Result<HubConfig> {
        HubConfig::from_variables(
            |name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value)),
            home.map(PathBuf::from),
        )
    }

    #[test]
    fn cache_folder_follows_the_order_of_the_python_libraries() {
        let check = |variables: &[(&str, &str)], expected: &str| {
            assert_eq!(read(variables, Some("/home/me")).unwrap().cache_dir, PathBuf::from(expected));
        };
        check(&[], "/home/me/.cache/huggingface/hub");
        check(&[("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub");
        check(&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/h")], "/h/hub");
        check(&[("HF_HOME", "/h"), ("HUGGINGFACE_HUB_CACHE", "/old")], "/old");
        check(&[("HF_HOME", "/h"), ("HUGGINGFACE_HUB_CACHE", "/old"), ("HF_HUB_CACHE", "/c")], "/c");
        check(&[("HF_HOME", "")], "/home/me/.cache/huggingface/hub");
    }

    #[test]
    fn without_any_folder_the_error_names_the_variables() {
        let error = read(&[], None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.hint().unwrap().contains("HF_HOME"));
    }

    #[test]
    fn offline_is_read_as_the_python_libraries_do() {
        for (value, expected) in [("1", true), ("true", true), ("YES", true), ("0", false), ("no", false)] {
            assert_eq!(read(&[("HF_HUB_OFFLINE", value)], Some("/h")).unwrap().offline, expected, "{value}");
        }
        assert!(read(&[("TRANSFORMERS_OFFLINE", "ON")], Some("/h")).unwrap().offline);
        assert!(!read(&[], Some("/h")).unwrap().offline);
    }

    #[test]
    fn token_comes_from_the_variable_then_from_the_file() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), "hf_file\n").unwrap();
        let hf_home = home.path().to_str().unwrap();

        let token = read(&[("HF_HOME", hf_home)], None).unwrap().token.unwrap();
        assert_eq!(token.secret(), "hf_file");
        assert!(token.origin().ends_with("token"));
        let token = read(&[("HF_HOME", hf_home), ("HF_TOKEN", " hf_env ")], None).unwrap().token.unwrap();
        assert_eq!((token.secret(), token.origin()), ("hf_env", "HF_TOKEN"));
        let elsewhere = read(&[("HF_HOME", hf_home), ("HF_TOKEN_PATH", "/nowhere/token")], None).unwrap();
        assert_eq!(elsewhere.token, None);
    }

    #[test]
    fn debug_never_shows_the_token() {
        let mut config = HubConfig::new("/c");
        config.token = Token::new("hf_secret", "HF_TOKEN");
        assert!(!format!("{config:?}").contains("hf_secret"));
    }
}
