//! A bucket of objects as S3 has it, as much of it as the tests' broker uses, so that what the broker stores outlives it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::{Receiver, Reply, Request};

/// By key, with a number that changes with each write.
type Objects = BTreeMap<String, (Vec<u8>, u64)>;

/// A running store on 127.0.0.1 that keeps everything in memory, as long as the value lives.
pub(crate) struct Bucket(Receiver);

impl Bucket {
    pub(crate) const NAME: &'static str = "broker";

    pub(crate) fn start() -> Self {
        let receiver = Receiver::builder().counting().start();
        let objects = Mutex::new(Objects::new());
        receiver.reply_with(move |request| {
            let mut objects = objects.lock().unwrap_or_else(PoisonError::into_inner);
            answer(&mut objects, request)
        });
        Self(receiver)
    }

    /// What a client needs in its environment.
    pub(crate) fn environment(&self) -> [(&'static str, String); 4] {
        let url = self.0.url();
        [
            ("AWS_ENDPOINT", url.trim_end_matches("/events").to_owned()),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_ACCESS_KEY_ID", "tests".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "tests".to_owned()),
        ]
    }
}

fn answer(objects: &mut Objects, request: &Request) -> Reply {
    let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
    let key = path
        .trim_start_matches('/')
        .trim_start_matches(Bucket::NAME)
        .trim_start_matches('/');
    match request.method.as_str() {
        "GET" if query.contains("list-type=2") => list(objects, query),
        "GET" => match objects.get(key) {
            Some((bytes, version)) => tagged(*version).body(bytes.clone()),
            None => Reply::status(404),
        },
        "PUT" => put(objects, key, request),
        _ => Reply::status(501),
    }
}

/// A write may ask for what it found to be there still, or for nothing to be there.
fn put(objects: &mut Objects, key: &str, request: &Request) -> Reply {
    let found = objects.get(key).map(|(_, version)| *version);
    let allowed = match (request.header("if-match"), request.header("if-none-match")) {
        (Some(tag), _) => found.is_some_and(|version| tag == tag_of(version)),
        (None, Some(_)) => found.is_none(),
        (None, None) => true,
    };
    if !allowed {
        return Reply::status(412);
    }
    let version = found.unwrap_or_default() + 1;
    objects.insert(key.to_owned(), (request.body.clone(), version));
    tagged(version)
}

fn list(objects: &Objects, query: &str) -> Reply {
    let prefix = query
        .split('&')
        .find_map(|pair| pair.strip_prefix("prefix="))
        .unwrap_or_default()
        .replace("%2F", "/");
    let mut body = "<ListBucketResult><IsTruncated>false</IsTruncated>".to_owned();
    for (key, (bytes, version)) in objects.iter().filter(|(key, _)| key.starts_with(&prefix)) {
        body += &format!(
            "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{}</ETag><Size>{}</Size></Contents>",
            tag_of(*version).replace('"', "&quot;"),
            bytes.len()
        );
    }
    body += "</ListBucketResult>";
    Reply::ok()
        .header("content-type", "application/xml")
        .body(body)
}

fn tagged(version: u64) -> Reply {
    Reply::ok()
        .header("etag", &tag_of(version))
        .header("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT")
}

fn tag_of(version: u64) -> String {
    format!("\"{version}\"")
}
