//! Addresses as far as the download needs them: origin, joining a redirect, percent-encoding.

use std::fmt;

use ureq::http::Uri;

/// An `http` or `https` address without a user name.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Address {
    text: String,
    /// Length of `scheme://host:port` in `text`.
    origin_len: usize,
    is_https: bool,
    host: String,
    port: u16,
}

impl Address {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let uri: Uri = text.parse().ok()?;
        let is_https = match uri.scheme_str()? {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        let authority = uri.authority()?;
        if authority.as_str().contains('@') || authority.host().is_empty() {
            return None;
        }
        let port = authority.port_u16().unwrap_or(if is_https { 443 } else { 80 });
        let origin_len = text.find("://")? + "://".len() + authority.as_str().len();
        let host = authority.host().to_ascii_lowercase();
        Some(Self { text: text.to_owned(), origin_len, is_https, host, port })
    }

    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    /// For messages: the host, and the port if it was written.
    pub(super) fn host(&self) -> &str {
        let origin = &self.text[..self.origin_len];
        origin.split_once("://").map_or(origin, |(_, host)| host)
    }

    pub(super) fn is_same_origin(&self, other: &Self) -> bool {
        (self.is_https, &self.host, self.port) == (other.is_https, &other.host, other.port)
    }

    pub(super) fn is_as_secure_as(&self, other: &Self) -> bool {
        self.is_https || !other.is_https
    }

    /// The address with `path`, which is encoded and begins with `/`, appended.
    pub(super) fn below(&self, path: &str) -> Self {
        Self { text: format!("{}{path}", self.text.trim_end_matches('/')), ..self.clone() }
    }

    /// Where a `Location` header leads from here.
    pub(super) fn join(&self, location: &str) -> Option<Self> {
        let scheme = if self.is_https { "https:" } else { "http:" };
        if location.contains("://") && !location.starts_with('/') {
            Self::parse(location)
        } else if location.starts_with("//") {
            Self::parse(&format!("{scheme}{location}"))
        } else if location.starts_with('/') {
            Self::parse(&format!("{}{location}", &self.text[..self.origin_len]))
        } else {
            let path = self.text.split('?').next().unwrap_or(&self.text);
            let folder = path.rfind('/').filter(|&slash| slash >= self.origin_len).unwrap_or(path.len());
            Self::parse(&format!("{}/{location}", &path[..folder]))
        }
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Address({})", self.host())
    }
}

/// Percent-encodes everything except the characters that are safe anywhere in an address, and `keep`.
pub(super) fn encode(text: &str, keep: &[u8]) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) || keep.contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_scheme_host_and_port() {
        let check = |left: &str, right: &str, expected: bool| {
            let (left, right) = (Address::parse(left).unwrap(), Address::parse(right).unwrap());
            assert_eq!(left.is_same_origin(&right), expected, "{} {}", left.as_str(), right.as_str());
        };
        check("https://a.co", "https://a.co/x?y=z", true);
        check("https://a.co", "https://A.CO:443/x", true);
        check("https://a.co", "http://a.co/", false);
        check("https://a.co", "https://a.co:444/", false);
        check("https://a.co", "https://cdn.a.co/", false);
        check("https://a.co", "https://a.co.evil.com/", false);
        check("http://127.0.0.1:81", "http://127.0.0.1:82", false);
    }

    #[test]
    fn what_is_not_an_address_is_refused() {
        for text in
            ["", "a.co", "ftp://a.co", "https://", "https://me:pass@a.co", "https://me@a.co/x", "http://a b"]
        {
            assert!(Address::parse(text).is_none(), "{text}");
        }
    }

    #[test]
    fn redirects_are_joined() {
        let check = |base: &str, location: &str, expected: &str| {
            assert_eq!(Address::parse(base).unwrap().join(location).unwrap().as_str(), expected);
        };
        check("https://a.co/x/y?z", "https://b.co/w?s=1", "https://b.co/w?s=1");
        check("https://a.co/x/y?z", "/w?u=http://v", "https://a.co/w?u=http://v");
        check("https://a.co/x/y?z", "//b.co/w", "https://b.co/w");
        check("https://a.co/x/y?z=/", "w", "https://a.co/x/w");
        check("https://a.co", "w", "https://a.co/w");
        assert!(Address::parse("https://a.co").unwrap().join("file:///etc/passwd").is_none());
    }

    #[test]
    fn names_are_encoded() {
        assert_eq!(encode("refs/pr/1", b""), "refs%2Fpr%2F1");
        assert_eq!(encode("a/b c#é?.gguf", b"/"), "a/b%20c%23%C3%A9%3F.gguf");
        let base = Address::parse("https://a.co/mirror").unwrap();
        assert_eq!(base.below("/api").as_str(), "https://a.co/mirror/api");
        assert_eq!(base.below("/api").host(), "a.co");
    }
}
