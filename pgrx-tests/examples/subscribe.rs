// Usage: subscribe CONNECTION. Needs tokio-postgres, and tokio with "macros", "rt" and "time".
use std::future::poll_fn;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_postgres::{AsyncMessage, Client, Error, NoTls};

const TOPICS: [&str; 1] = ["reservation.*"];

/// The last position that can be read now.
async fn tail(db: &Client) -> Result<String, Error> {
    let row = db.query_one("select coalesce(outbox.tail(), '0:0')", &[]);
    Ok(row.await?.get(0))
}

/// Handles what has come behind a position, and moves it.
async fn catch_up(db: &Client, after: &mut String) -> Result<(), Error> {
    let sql = "select position, topic, coalesce(payload ->> 'n', '') from outbox.read($1, 1000, topics => $2::text[])";
    loop {
        let end = tail(db).await?; // asked for first: up to there, nothing can be missed
        let events = db.query(sql, &[after, &TOPICS.as_slice()]).await?;
        for event in &events {
            println!("{} {}", event.get::<_, &str>(1), event.get::<_, &str>(2));
            *after = event.get(0);
        }
        if events.is_empty() {
            if end != "0:0" {
                *after = end;
            }
            return Ok(());
        }
    }
}

async fn subscribe(url: &str, after: &mut Option<String>) -> Result<(), Error> {
    let (db, mut connection) = tokio_postgres::connect(url, NoTls).await?;
    let (wake, mut woken) = mpsc::channel(1);
    tokio::spawn(async move {
        while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
            if let AsyncMessage::Notification(_) = message {
                let _ = wake.try_send(());
            }
        }
    });
    db.batch_execute("listen outbox").await?; // before the first look, so that nothing falls in between
    let after = match after {
        Some(after) => after,                   // where it was before the reconnect
        None => after.insert(tail(&db).await?), // from now on
    };
    loop {
        catch_up(&db, after).await?;
        let _ = timeout(Duration::from_secs(30), woken.recv()).await;
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let url = std::env::args().nth(1).expect("a connection string");
    let mut after = None;
    loop {
        if let Err(error) = subscribe(&url, &mut after).await {
            eprintln!("reconnecting: {error}");
            sleep(Duration::from_secs(1)).await;
        }
    }
}
