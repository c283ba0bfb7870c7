"""A site's state and runs as one folder that is consistent in itself, taken while the site works, and back again."""

from qinglan.ops.backup.making import make_backup
from qinglan.ops.backup.records import BACKUP_FILE, Backup
from qinglan.ops.backup.restoring import restore_backup

__all__ = ["BACKUP_FILE", "Backup", "make_backup", "restore_backup"]
