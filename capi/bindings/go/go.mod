module sluice

go 1.18
