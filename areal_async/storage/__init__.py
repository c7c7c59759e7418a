"""Models, tasks, checkpoints and run folders in a store such as S3. A store replaces a disk that hosts share.

`urls` defines URLs and their local paths. `remote` sends requests to a store. `transfer` copies files and
folders from and to a store, completely or not at all. `content` fetches the content that a job names.
`mirror` keeps a run's folder in a store up to date. docs/storage.md describes the use."""
