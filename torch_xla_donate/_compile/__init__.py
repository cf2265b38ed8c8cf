"""compile: functions that run as one step. `api` has the public function; `lazy`, `pure` and `openxla` the backends."""
