"""One file a schedule: `schedule(progress, epochs, *, ...) -> factor` on every learning rate; `progress` counts epochs and their parts."""
