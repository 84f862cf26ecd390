module local

go 1.19

require sluice v0.0.0
