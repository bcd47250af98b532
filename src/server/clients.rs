//! Clients: the units among which the engine divides its capacity.
//!
//! A client is an API key. Without keys it is the address of the connection. With `--trust-client-ids`,
//! senders act for others and name them: then it is the name in the header `x-client-id`, or else in the
//! field `user`, for each key. Only a few new names and addresses a second become clients of their own
//! (`new_clients.rs`). The engine sees numbers only; no name is stored.

use std::hash::{BuildHasher, Hash, RandomState};
use std::net::{IpAddr, Ipv6Addr};

use axum::http::{HeaderMap, HeaderName, Request};

use super::error::ApiError;
use super::keys::FoundKey;
use super::new_clients::NewClients;
use tinyvllm::engine::{ClientId, Weight};

pub(super) const HEADER: HeaderName = HeaderName::from_static("x-client-id");

/// The client for which a request is served.
#[derive(Debug, Clone, Copy)]
pub(super) struct Client {
    pub(super) id: ClientId,
    pub(super) weight: Weight,
    /// The group whose capacity it shares with other clients of the same key.
    pub(super) group: ClientId,
    key: Option<usize>,
    /// Whether the header names the client. The field `user` does not count then.
    is_named: bool,
}

impl Client {
    /// The client that was identified when the request was admitted.
    pub(super) fn of<B>(request: &Request<B>) -> Result<Self, ApiError> {
        let client = request.extensions().get::<Self>().copied();
        client.ok_or_else(|| ApiError::internal("a request without a client reached the handler"))
    }
}

/// Assigns numbers to clients.
#[derive(Debug)]
pub(super) struct Clients {
    trusts_names: bool,
    /// A 64-bit hash with a random key of this process, so that no client can choose another one's number.
    hasher: RandomState,
    new_clients: NewClients,
}

impl Clients {
    pub(super) fn new(trusts_names: bool) -> Self {
        Self { trusts_names, hasher: RandomState::new(), new_clients: NewClients::new() }
    }

    /// Identifies the client of a request from this address, with this key if keys are needed.
    pub(super) fn identify(&self, headers: &HeaderMap, key: Option<FoundKey>, address: IpAddr) -> Client {
        let name = headers.get(&HEADER).filter(|name| self.trusts_names && !name.is_empty());
        let number = key.map(|key| key.number);
        let of_key = number.map(|number| ClientId(self.hasher.hash_one(("key", number))));
        let id = match (name, of_key) {
            (Some(name), _) => self.named(number, name.as_bytes()),
            (None, Some(of_key)) => of_key,
            (None, None) => self.own_or_new(None, ("address", address)),
        };
        Client {
            id,
            group: of_key.unwrap_or(id),
            weight: key.map_or(Weight::default(), |key| key.weight),
            key: number,
            is_named: name.is_some(),
        }
    }

    /// The same client, or the one that the field `user` of its request names.
    pub(super) fn rename(&self, client: Client, user: Option<&str>) -> Client {
        match user.filter(|user| self.trusts_names && !client.is_named && !user.is_empty()) {
            Some(user) => {
                let id = self.named(client.key, user.as_bytes());
                Client { id, group: client.key.map_or(id, |_| client.group), ..client }
            }
            None => client,
        }
    }

    fn named(&self, key: Option<usize>, name: &[u8]) -> ClientId {
        self.own_or_new(key, ("name", key, name))
    }

    /// The client with this identity. If it is new and too many are, the client that all new identities of
    /// the key share.
    fn own_or_new(&self, key: Option<usize>, identity: impl Hash) -> ClientId {
        let [own, others] =
            [self.hasher.hash_one(identity), self.hasher.hash_one(("newcomers", key))].map(ClientId);
        self.new_clients.resolve(own, others)
    }
}

/// Normalises an address. With IPv6 it is the network of a site, which has as many addresses as it likes.
pub(super) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_then_names_then_addresses() {
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let key = |number| Some(FoundKey { number, weight: Weight::new(7).unwrap() });
        let mut named = HeaderMap::new();
        named.insert(HEADER, "ann".parse().unwrap());
        let none = HeaderMap::new();
        let (here, there) = (address("10.0.0.1"), address("10.0.0.2"));
        for trusts_names in [false, true] {
            let clients = Clients::new(trusts_names);
            let id = |headers: &HeaderMap, key, address, user| {
                clients.rename(clients.identify(headers, key, address), user).id
            };
            assert_ne!(id(&none, None, here, None), id(&none, None, there, None));
            assert_eq!(id(&none, key(1), here, None), id(&none, key(1), there, None));
            assert_ne!(id(&none, key(1), here, None), id(&none, key(2), here, None));
            assert_eq!(clients.identify(&none, key(1), here).weight.get(), 7);
            // A trusted name is one client from every address, but not across keys.
            assert_eq!(id(&named, None, here, None) == id(&named, None, there, None), trusts_names);
            assert_eq!(id(&none, None, here, Some("ann")) == id(&named, None, there, None), trusts_names);
            assert_eq!(id(&named, key(1), here, Some("bob")) == id(&none, key(1), here, None), !trusts_names);
            assert_ne!(id(&named, key(1), here, None), id(&named, key(2), here, None));
            assert_eq!(id(&named, key(1), here, Some("bob")), id(&named, key(1), here, None));
            assert_eq!(id(&none, None, here, Some("")), id(&none, None, here, None));
        }
    }

    #[test]
    fn networks() {
        let check = |address: &str, expected: &str| {
            assert_eq!(network(address.parse().unwrap()), expected.parse::<IpAddr>().unwrap());
        };
        check("192.0.2.7", "192.0.2.7");
        check("::ffff:192.0.2.7", "192.0.2.7");
        check("::1", "::1");
        check("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::");
    }
}
