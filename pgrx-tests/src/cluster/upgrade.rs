//! pg_upgrade, as an administrator runs it.

use super::{Cluster, Mode, configure, template};
use crate::process::{finish, server_program};
use crate::testbed::{give_to_server, new_folder, program};

impl Cluster {
    /// Stops this cluster and makes one of a later major version of it, which starts. Settings are those given, not the old ones.
    #[track_caller]
    pub fn upgrade(mut self, major: u32, settings: &[(&str, &str)]) -> Cluster {
        self.stop(Mode::Fast);
        let folder = new_folder("c");
        give_to_server(&folder);
        let data = folder.join("data");
        // From version 18 on it is yes if nothing is said, and both must be alike.
        let arguments: &[&str] = if major >= 18 {
            &["--no-data-checksums"]
        } else {
            &[]
        };
        template::init(major, &data, arguments);
        let settings = settings
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        configure(&data, &settings.collect::<Vec<_>>());

        let bin = |major| {
            let postgres = program(major, "postgres");
            postgres.parent().expect("it is in a folder").to_owned()
        };
        let mut upgrade = server_program(major, "pg_upgrade");
        upgrade.current_dir(&folder);
        upgrade.arg("-b").arg(bin(self.major));
        upgrade.arg("-B").arg(bin(major));
        upgrade.arg("-d").arg(self.data()).arg("-D").arg(&data);
        upgrade.arg("-s").arg(&folder).args(["-U", "postgres"]);
        upgrade.args(["-p", &self.port.to_string()]);
        upgrade.args(["-P", &crate::ports::free().to_string()]);
        finish(upgrade);
        Self::run(major, folder)
    }
}
