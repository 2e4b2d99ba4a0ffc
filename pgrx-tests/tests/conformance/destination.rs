//! What the suite has to be able to do with whatever a kind of sink delivers to.

use postgres::Client;
use serde_json::Value;

/// What becomes of an event that is delivered once more, because a crash came between its arrival and the save of the cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeats {
    /// It is there twice.
    Shown,
    /// The destination knows that it has it.
    Recognised,
    /// There are none: arrival and cursor are saved together.
    Impossible,
}

/// A real destination, which starts with the value and ends with it.
pub trait Destination: Sized {
    const KIND: &'static str;
    const REPEATS: Repeats;
    /// Whether all events arrive in one order, or only those of each (source, subject).
    const ONE_ORDER: bool;
    /// The bytes of a payload that it does not take; most take 64 kB.
    const TOO_LARGE: usize = 100_000;
    /// Further arguments of its sink.
    const ARGUMENTS: &'static str = "";

    fn start() -> Self;

    /// Makes what its sink needs in the database: secrets, tables, functions.
    fn prepare(&mut self, _db: &mut Client) {}

    /// The config of its sink. A delivery that is not answered ends within two seconds.
    fn config(&self) -> Value;

    /// Configs that have to be refused when they are set.
    fn bad_configs(&self) -> Vec<Value>;

    /// The values of its secrets, which must be seen nowhere.
    fn secrets(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// The ids of all events that it has taken, in order of arrival as far as there is one, repeats among them.
    fn arrived(&mut self, db: &mut Client) -> Vec<String>;

    /// It cannot be reached, or takes nothing; and can again, with all that it had.
    fn go_down(&mut self, db: &mut Client);
    fn come_up(&mut self, db: &mut Client);

    /// It takes connections and requests, and answers nothing; and does again.
    fn hang(&mut self) {}
    fn resume(&mut self) {}

    /// The topic of events that it refuses for good, whatever it does with others.
    fn poison_topic(&self) -> String;

    /// The topic of events that it does not take yet, while it takes others; and from now on takes them.
    fn unwelcome_topic(&self) -> String {
        self.poison_topic()
    }
    fn welcome(&mut self, _db: &mut Client) {}
}

/// The same destination for a sink that is isolated by key.
pub struct ByKey<D>(D);

impl<D: Destination> Destination for ByKey<D> {
    const KIND: &'static str = D::KIND;
    const REPEATS: Repeats = D::REPEATS;
    const ONE_ORDER: bool = false;
    const TOO_LARGE: usize = D::TOO_LARGE;
    const ARGUMENTS: &'static str = ", isolation => 'key'";

    fn start() -> Self {
        Self(D::start())
    }

    fn prepare(&mut self, db: &mut Client) {
        self.0.prepare(db);
    }

    fn config(&self) -> Value {
        self.0.config()
    }

    fn bad_configs(&self) -> Vec<Value> {
        self.0.bad_configs()
    }

    fn secrets(&self) -> Vec<&'static str> {
        self.0.secrets()
    }

    fn arrived(&mut self, db: &mut Client) -> Vec<String> {
        self.0.arrived(db)
    }

    fn go_down(&mut self, db: &mut Client) {
        self.0.go_down(db);
    }

    fn come_up(&mut self, db: &mut Client) {
        self.0.come_up(db);
    }

    fn hang(&mut self) {
        self.0.hang();
    }

    fn resume(&mut self) {
        self.0.resume();
    }

    fn poison_topic(&self) -> String {
        self.0.poison_topic()
    }

    fn unwelcome_topic(&self) -> String {
        self.0.unwelcome_topic()
    }

    fn welcome(&mut self, db: &mut Client) {
        self.0.welcome(db);
    }
}
